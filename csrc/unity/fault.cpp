// No header of torch: what these share is instances of the standard library's templates.
#include "../fault/expected_collective.cpp"
#include "../fault/fault_events.cpp"
#include "../fault/fault_wait.cpp"
#include "../fault/fault_watch.cpp"
#include "../fault/step_timing.cpp"
#include "../fault/step_timing_board.cpp"
#include "../fault/wait_scope.cpp"
