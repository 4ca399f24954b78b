// A digest of raw bits: 64 bits that differ where bytes, their order or their number do.
//
// Ranks compare digests of what they should all have, so NaN with other bits is another value.
// Blocks are digested by themselves, so that threads may share the work; the digests of blocks are
// then folded in order. Within a block, word i of 64 bits belongs to lane i % kDigestLanes, and
// lanes do not wait for each other. Each step is a bijection of the digest before it and of the
// word, so one changed word always changes the digest of its block. A product carries a bit up, the
// shift carries it down again: without that, the highest bits of two words could cancel out, and
// these are signs.
#pragma once

#include <cstdint>

#include "element.h"

namespace fastsync::kernels {

constexpr int64_t kDigestBlock = int64_t{1} << 15;  // bytes
constexpr int64_t kDigestLanes = 32;

FS_HOST_DEVICE uint64_t digest_step(uint64_t digest, uint64_t word) {
  const uint64_t mixed = (digest ^ word) * 0x243f6a8885a308d3ULL;  // odd: the first digits of pi
  return mixed ^ (mixed >> 32);
}

// The digest of a block of at most kDigestBlock bytes, the last word of which is filled up with
// zeros.
uint64_t digest_block_cpu(const void* data, int64_t bytes);

// The digest of `bytes` bytes that are `blocks` blocks, from the digests of these.
uint64_t fold_digests(const uint64_t* digests, int64_t blocks, int64_t bytes);

}  // namespace fastsync::kernels
