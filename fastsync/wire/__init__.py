"""What gradients travel as: formats, codecs, and plugins compiled by users."""
