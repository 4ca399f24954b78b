// Parsing torch's headers is what compiling costs, so files that need the same ones share a parse.
#include "../bindings/groups.cpp"
#include "../bindings/module.cpp"
#include "../bindings/specs.cpp"
#include "../bindings/watch.cpp"
