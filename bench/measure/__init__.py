"""What benchmarks measure with: declarations, jobs, links, parts of a step, kernels."""
