# Steps with times, and the folder that holds what CI builds. Sourced by .ci/run.

ROOT=$PWD
NEWEST_TORCH=$(sed -n 's/^torch==//p' requirements-dev.txt)
OLDEST_TORCH=$(sed -n 's/.*"torch>=\([0-9.]*\)".*/\1.0/p' pyproject.toml)
CUDA_TORCH_GIB=8 # an environment with a CUDA build of torch, and what pip unpacks on the way

STARTED=$SECONDS
TABLE=()

# step NAME COMMAND...: runs a command or function, which ends at its first error.
step() {
  local name=$1 begin=$SECONDS code
  shift
  printf '\n=== %s\n' "$name"
  set +e
  (
    set -e
    "$@"
  )
  code=$?
  set -e
  local seconds=$((SECONDS - begin)) note=""
  if [[ -e $WORK/skipped ]]; then
    note="  skipped: $(cat "$WORK/skipped")"
    rm "$WORK/skipped"
  fi
  TABLE+=("$(printf '%6d s  %s%s' "$seconds" "$name" "$note")")
  printf -- '--- %s: %d s%s\n' "$name" "$seconds" "$note"
  if ((code != 0)); then
    summary
    repeat_test_results
    printf '\nFAILED: %s (exit code %d)\n' "$name" "$code"
    exit 1
  fi
}

# skip REASON: says in the log and in the summary that this step did nothing.
skip() {
  echo "skipped: $1"
  echo "$1" >"$WORK/skipped"
}

summary() {
  printf '\n=== summary: torch %s to %s\n' "$OLDEST_TORCH" "$NEWEST_TORCH"
  printf '%s\n' "${TABLE[@]}"
  printf '%6d s  in all\n' $((SECONDS - STARTED))
  if [[ -e $WORK/unstable ]]; then cat "$WORK/unstable"; fi
}

# The last lines of the output: what pytest said, that of `make test` last.
repeat_test_results() {
  local run log
  for run in "tests-$OLDEST_TORCH" "other-tests-$NEWEST_TORCH" "tests-$NEWEST_TORCH"; do
    log=$WORK/$run.log
    if [[ -e $log ]]; then
      printf 'pytest, %s:\n' "${run/tests-/tests, torch }"
      grep -E '^[0-9]+ [a-z]+.* in [0-9.]+s' "$log" || echo "no result"  # of each process
    fi
  done
}

# The folder is named by what is installed into it. Folders of other requirements that nobody uses are removed.
open_state() {
  local prefix hash other
  prefix=${TMPDIR:-/tmp}/fastsync-ci-$(id -u)
  hash=$(cat requirements-*.txt pyproject.toml | sha256sum | head -c 12)
  STATE=$prefix-$hash
  mkdir -p -m 700 "$STATE"
  exec 9>"$STATE/lock"
  flock -n 9 || {
    echo "another run is using $STATE; waiting for it"
    flock 9
  }
  for other in "$prefix"-*; do
    [[ $other == "$STATE" ]] || flock -n "$other/lock" rm -rf "$other" || true
  done
  WORK=$STATE/work
  rm -rf "$WORK"
  mkdir "$WORK"
  export FASTSYNC_CACHE_DIR=$STATE/jit
}

close_state() {
  rm -rf "$WORK"
}

# need_space GIB FOR: fails with a clear message where the disk is too full.
need_space() {
  local free
  free=$(($(df -Pk "$STATE" | awk 'NR == 2 { print $4 }') / 1024 / 1024))
  ((free >= $1)) || {
    echo "error: $2 needs $1 GiB under ${TMPDIR:-/tmp}, but only $free GiB are free; set TMPDIR to another disk"
    return 1
  }
}

# new_venv NAME PIP_ARGUMENTS...: makes $STATE/NAME unless a former run has finished it.
new_venv() {
  local venv=$STATE/$1
  shift
  if [[ -e $venv/.complete ]]; then
    echo "reusing the environment of a former run"
    return
  fi
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install --disable-pip-version-check -q "$@"
  touch "$venv/.complete"
}

# Whether there is an nvcc. Where there is none, this step is skipped if that is allowed, else it fails.
with_nvcc() {
  if command -v nvcc >/dev/null; then return 0; fi
  if [[ $ALLOW_NO_NVCC != 1 ]]; then
    echo "error: no nvcc on PATH; install a CUDA toolkit, or set FASTSYNC_CI_ALLOW_NO_NVCC=1 to skip what needs it"
    exit 1
  fi
  skip "no nvcc"
  return 1
}
