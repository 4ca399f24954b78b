// Gradients summed in full precision inside a node, and coded between nodes.
//
//   pack ─▶ reduce-scatter in the node ─▶ encode my shard
//        ─▶ two-shot or gather among the ranks with my place in all nodes
//        ─▶ decode my shard ─▶ all-gather in the node ─▶ unpack
//
// Of L ranks in each of n nodes every one codes and sends 1/L of the bucket: 2 (n-1)/n of the coded
// bucket over L leave a rank for other nodes, and no gradient is rounded before its node's sum.
// ZeRO++ (Wang et al., 2023) and BytePS cut the way of gradients at the same place.
//
// [Note: residuals of a shard]
// A rank loses precision, and so keeps a residual, in its own shard only. A new plan moves shards
// between ranks; the residual that a rank holds of others' shards then goes with its next
// gradients, in full precision, to the rank that codes them.
#pragma once

#include "coded_spec.h"
#include "coding.h"

namespace fastsync::engine {

// Needs pipelines of four process groups: in the node, between nodes, between nodes, in the node.
std::unique_ptr<Coding> make_hierarchical(const CodedSpec& spec, at::Device device);

}  // namespace fastsync::engine
