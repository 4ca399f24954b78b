"""Plans of gradients and buckets: pure functions of parameters, policy and order."""
