"""Everything that needs a GPU, with one command."""
