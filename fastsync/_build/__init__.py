"""How the extension is built and loaded, and the environment that this depends on."""
