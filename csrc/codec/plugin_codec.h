// Codecs in shared libraries of users.
#pragma once

#include <memory>

#include "../codec_plugin.h"
#include "coder.h"

namespace fastsync::engine {

// `table` lives as long as the process.
std::shared_ptr<Codec> make_plugin_codec(const fastsync_codec* table);

}  // namespace fastsync::engine
