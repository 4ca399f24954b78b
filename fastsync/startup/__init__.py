"""A folder for PYTHONPATH: Python imports `sitecustomize` from there when it starts."""
