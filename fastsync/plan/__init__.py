"""Which gradient goes where: pure functions of parameters, policy and order."""
