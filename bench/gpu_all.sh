#!/usr/bin/env bash
# Everything that needs a GPU: see `bench/gpu_all.sh --help` and docs/gpu.md. PYTHON names another interpreter.
cd "$(dirname "$0")/.." || exit
PYTHONPATH=. exec "${PYTHON:-python3}" -m bench gpu_all "$@"
