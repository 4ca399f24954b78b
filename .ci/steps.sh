# What each step does. Sourced by .ci/run.

tests() {
  local log=$WORK/tests-$NEWEST_TORCH.log
  timeout 2400 make test ARGS=--durations=40 2>&1 | tee "$log" || once_more "$log" test "not slow"
}

# What `make test` leaves out: a tenth of the files, others from commit to commit, since all would take too long.
other_tests() {
  local part=$((16#$(git rev-parse HEAD | head -c 6) % 10 + 1))/10 log=$WORK/other-tests-$NEWEST_TORCH.log
  timeout 3300 make test-all ARGS="-m slow --durations=40 --part $part" 2>&1 | tee "$log" ||
    once_more "$log" test-all slow
}

# once_more LOG TARGET MARKER: runs up to three tests that failed again, alone, since on a busy machine ranks can come so
# late that a fault has another ending. Fails if one of them fails again. The summary names them all.
once_more() {
  local failed
  failed=$(grep -aE '^(FAILED|ERROR) tests/' "$1" | cut -d ' ' -f 2)
  if [[ -z $failed || $(wc -l <<<"$failed") -gt 3 ]]; then return 1; fi
  echo "running again, alone: ${failed//$'\n'/, }"
  timeout 600 make "$2" ARGS="-m '$3' -n 0 --last-failed --last-failed-no-failures none"
  sed 's/^/failed once, then passed: /' <<<"$failed" >>"$WORK/unstable"
}

# That it sees faults is what tests/conformance/test_torch_suite.py shows, with wrappers that are broken on purpose.
torch_suite() {
  timeout 600 make torch-suite ARGS=--quiet
}

# Libraries beside .venv, whose torch they take. An index may lack them, or lack a version.
training_libraries() {
  local venv=$STATE/ecosystem log=$WORK/ecosystem.log
  if [[ ! -e $venv/.complete ]]; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
  fi
  # Of this clone, whichever clone made the environment.
  .venv/bin/python -c 'import site; print(site.getsitepackages()[0])' >"$(echo "$venv"/lib/python*/site-packages)/development.pth"
  if [[ ! -e $venv/.complete ]]; then
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check -q -r requirements-ecosystem.txt 2>"$log"; then
      cat "$log"
      grep -q 'No matching distribution found' "$log" || return 1
      skip "the package index lacks $(sed -n 's/.*No matching distribution found for //p' "$log")"
      return
    fi
    touch "$venv/.complete"
  fi
  timeout 900 "$venv/bin/python" -m pytest tests/conformance/test_ecosystem.py tests/tools/test_peers.py
}

install_tools() {
  new_venv tools -r requirements-ci.txt
}

# What `make setup` has compiled.
machine_code() {
  if with_nvcc; then "$STATE/tools/bin/python" csrc/tests/check_sass.py "$(extension_folder)"; fi
}

extension_folder() {
  PATH=.venv/bin:$PATH PYTHONPATH=. python -c 'from fastsync._build import extension; print(extension.find().parent)'
}

# build_with_cmake FOLDER OPTIONS...
build_with_cmake() {
  local folder=$1
  shift
  local PATH=$STATE/tools/bin:$PATH
  cmake -S . -B "$folder" -G Ninja "$@"
  cmake --build "$folder"
  ctest --test-dir "$folder" --output-on-failure -LE gpu -j "$(nproc)"
}

# Tests that need a GPU are compiled only.
cmake_plain() {
  local cuda=OFF
  if with_nvcc; then cuda=ON; fi
  build_with_cmake "$WORK/cmake" -DFASTSYNC_DEVICE_TESTS=$cuda
}

cmake_sanitized() {
  build_with_cmake "$WORK/cmake-asan" -DFASTSYNC_SANITIZE=address,undefined
}

# The worker thread is the only one of ours that runs beside another.
threads_sanitized() {
  local PATH=$STATE/tools/bin:$PATH
  cmake -S . -B "$WORK/cmake-tsan" -G Ninja -DFASTSYNC_SANITIZE=thread
  local tests="worker device_monitor channel mailbox peers"
  # shellcheck disable=SC2086  # names without spaces
  cmake --build "$WORK/cmake-tsan" --target $(printf 'test_%s ' $tests)
  ctest --test-dir "$WORK/cmake-tsan" -R "^(${tests// /|})$" --output-on-failure -j "$(nproc)"
}

# Python itself is not instrumented, so the runtimes are preloaded, into Python but not into the compiler. Leaks are
# not looked for: the interpreter keeps memory until it exits.
sanitized_python() {
  local runtimes="" name
  for name in libasan.so libubsan.so libstdc++.so; do
    runtimes+="$(c++ -print-file-name=$name) "
  done
  CXX=$WORK/cxx FASTSYNC_CUDA=0 FASTSYNC_SANITIZE=address,undefined LD_PRELOAD=$runtimes \
    ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 timeout 900 .venv/bin/python "$@"
}

extension_sanitized() {
  printf '#!/bin/sh\nunset LD_PRELOAD\nexec c++ "$@"\n' >"$WORK/cxx"
  chmod +x "$WORK/cxx"
  sanitized_python .ci/smoke.py
  if sanitized_python .ci/overflow.py >"$WORK/overflow.log" 2>&1; then
    echo "error: a planted overflow went unnoticed: the sanitizers are blind"
    return 1
  fi
  grep -m 1 'heap-buffer-overflow' "$WORK/overflow.log" || {
    cat "$WORK/overflow.log"
    return 1
  }
}

# `===` takes the build that the version number alone names, which is one for CUDA; `==` would also take a CPU build.
oldest_torch() {
  if [[ ! -e $STATE/oldest/.complete ]]; then need_space "$CUDA_TORCH_GIB" "torch $OLDEST_TORCH for CUDA"; fi
  grep -v '^torch==' requirements-dev.txt >"$WORK/requirements.txt"
  new_venv oldest "torch===$OLDEST_TORCH" -r "$WORK/requirements.txt"
}

# An installed package must load what was compiled with it: there is no compiler, and the cache stays empty. The kernels
# are compiled by nvcc, for one architecture of those that `make setup` has compiled for, and linked in; ranks run on the
# CPU. Where there is no nvcc the extension has none.
package_with_oldest() {
  local expect=(--prebuilt) cache=$WORK/empty-cache PATH=$STATE/oldest/bin:$PATH
  if with_nvcc; then expect+=(--cuda-build); fi
  FASTSYNC_CUDA_ARCHS=80 \
    python -m pip install --disable-pip-version-check -q --no-build-isolation --no-deps --target "$WORK/site" .
  mkdir "$cache" "$WORK/elsewhere"
  cd "$WORK/elsewhere"
  CXX=/bin/false FASTSYNC_CACHE_DIR=$cache PYTHONPATH=$WORK/site timeout 200 python "$ROOT/.ci/smoke.py" "${expect[@]}"
  replaced_in_spawned_processes "$cache" -m fastsync.run --with wire=bf16
  FASTSYNC_REPLACE_DDP=wire=bf16 replaced_in_spawned_processes "$cache" -m fastsync.run
  PYTHONPATH=$WORK/site python -m fastsync.plan --params 7e9 --batch 1x512
  if [[ -n $(ls -A "$cache") ]]; then
    echo "error: importing the installed package compiled something into the cache"
    return 1
  fi
}

# Those of the checkout, of the package that the step before has installed.
tests_with_oldest() {
  cp -r tests pyproject.toml "$WORK/elsewhere"
  cd "$WORK/elsewhere"
  PYTHONPATH=$WORK/site PATH=$STATE/oldest/bin:$PATH FASTSYNC_CACHE_DIR=$WORK/empty-cache timeout 900 \
    python -m pytest tests/ddp/test_parity.py tests/ddp/test_gradient_views.py tests/ddp/test_unused.py 2>&1 |
    tee "$WORK/tests-$OLDEST_TORCH.log"
}

# replaced_in_spawned_processes CACHE PYTHON-ARGUMENTS...: of a script that knows nothing of fastsync, by the installed one.
replaced_in_spawned_processes() {
  local cache=$1 log=$WORK/spawned.log
  shift
  CXX=/bin/false FASTSYNC_CACHE_DIR=$cache PYTHONPATH=$WORK/site \
    timeout 100 python "$@" "$ROOT/tests/tools/spawning_script.py" | tee "$log"
  if [[ $(grep -oF "|FastDDP|bf16|[0.5, 0.5]|$WORK/site/fastsync>" "$log" | wc -l) != 2 ]]; then
    echo "error: the processes that a script spawned were not given the installed FastDDP"
    return 1
  fi
}
