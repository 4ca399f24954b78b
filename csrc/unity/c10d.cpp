// Parsing torch's headers is what compiling costs, so files that need the same ones share a parse.
#include "../bindings/ops.cpp"
#include "../comm/collective.cpp"
#include "../comm/host_backend.cpp"
#include "../comm/python_hook.cpp"
#include "../comm/worker.cpp"
