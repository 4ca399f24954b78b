// Parsing torch's headers is what compiling costs, so files that need the same ones share a parse.
#include "../bindings.cpp"

#include "../bind_specs.cpp"
#include "../bind_units.cpp"
#include "../bind_watch.cpp"
#include "../codec/python_codec.cpp"
