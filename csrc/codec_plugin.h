/* A wire format in a shared library of your own. This header is plain C and needs no other.
 *
 *   include=$(python -c 'import fastsync; print(fastsync.include_dir())')
 *   c++ -O3 -shared -fPIC -I "$include" mine.cpp -o libmine.so
 *
 *   model = fastsync.FastDDP(model, payload=fastsync.load_codec("./libmine.so"))
 *
 * The library exports one function, FASTSYNC_CODEC_ENTRY, which returns a table that lives as long
 * as the process. Its functions are called one at a time, without the GIL, from the backward's
 * thread and from a worker thread. They work on host memory: the gradients must be on the CPU.
 */
#ifndef FASTSYNC_CODEC_PLUGIN_H
#define FASTSYNC_CODEC_PLUGIN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes whenever the table does. */
#define FASTSYNC_CODEC_VERSION 1

enum {
  FASTSYNC_TWO_SHOT = 0, /* each rank sums a part of the bucket, and codes the sum again */
  FASTSYNC_GATHER = 1    /* every rank sums what all ranks sent */
};

typedef struct fastsync_codec {
  int32_t version; /* FASTSYNC_CODEC_VERSION */
  int32_t form;    /* FASTSYNC_TWO_SHOT or FASTSYNC_GATHER */
  /* Not 0: a code's error is added to the next step's gradient, unless the user says otherwise. */
  int32_t error_feedback;
  int32_t whole;    /* not 0: a bucket is one chunk; FASTSYNC_GATHER only */
  int64_t block;    /* elements; chunks are multiples of it, unless they are whole buckets */
  const char* name; /* in messages; equal on all ranks, as is all that changes the code */
  void* context;    /* given to the functions */

  /* Bytes of a coded chunk of `numel` elements; with `whole`, of a coded bucket with `numel`
   * elements of gradients. */
  int64_t (*coded_bytes)(void* context, int64_t numel);

  /* Writes the code of `values`, which it may overwrite, to the `bytes` bytes at `payload`, aligned
   * to 16. The values are gradients divided by the number of ranks, error feedback included; NaN
   * and infinities shall arrive as such. Returns NULL, or a text that says what is wrong, which
   * becomes an exception. */
  const char* (*encode)(void* context, float* values, int64_t numel, uint8_t* payload,
                        int64_t bytes);

  /* Writes the `numel` values that the code stands for. */
  const char* (*decode)(void* context, const uint8_t* payload, int64_t bytes, float* values,
                        int64_t numel);
} fastsync_codec;

#define FASTSYNC_CODEC_ENTRY fastsync_codec_entry

#if defined(_WIN32)
#define FASTSYNC_CODEC_EXPORT __declspec(dllexport)
#else
#define FASTSYNC_CODEC_EXPORT __attribute__((visibility("default")))
#endif

FASTSYNC_CODEC_EXPORT const fastsync_codec* FASTSYNC_CODEC_ENTRY(void);

#ifdef __cplusplus
}
#endif

#endif
