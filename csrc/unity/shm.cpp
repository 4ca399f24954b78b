// No header of torch, as in fault.cpp.
#include "../shm/channel.cpp"
#include "../shm/futex_event.cpp"
#include "../shm/mailbox.cpp"
#include "../shm/segment.cpp"
