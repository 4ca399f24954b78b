"""What was asked for, checked on every rank, and what torch's front finds where its engine was."""
