"""Forms in which gradients travel: formats, codecs, and plugins compiled by users."""
