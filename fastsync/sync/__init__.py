"""How often ranks average: local SGD, DiLoCo and delayed averages."""
