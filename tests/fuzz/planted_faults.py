"""Faults that a test of `make test` finds each: see planted.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One way to break the engine.

    Attributes:
        name: says what is wrong then.
        file: the file that is changed.
        text: what is replaced; it is there once.
        instead: what replaces it.
        test: the test that fails then, with its parameters.
    """

    name: str
    file: str
    text: str
    instead: str
    test: str


WEIGHTS = "fastsync/reducer/mean_weights.py"
MEANS = "tests/ddp/test_mean_weights.py"
SHARES = "fastsync/ddp/shares.py"
SHARED = "tests/ddp/test_shares.py"
SKIPS = "tests/faults/test_skipped_steps.py"
UNIT_MEANS = "tests/fsdp/test_fsdp_weights.py"
ROUNDS = "tests/sync/test_rounds.py"
CHUNKED = "tests/wire/test_chunked_topk.py"
GROUPS = "tests/ddp/test_groups.py"
DTENSORS = "tests/ddp/test_dtensors.py"
ZERO_DTENSORS = "tests/zero/test_zero_dtensors.py"
DTENSOR_STATES = "tests/zero/test_dtensor_states.py"
PARAM_GROUPS = "fastsync/config/param_groups.py"
MEMBERS = "tests/sync/test_membership.py::test_parameters_are_those_of_the_ranks_that_have_come"
PARTS = "tests/sync/test_modes.py::test_parts_average_gradients_within_and_parameters_between"
FAULTS = [
    # --- weights of micro-batches
    Fault(
        "mean-over-ranks-in-spite-of-weights",
        WEIGHTS,
        "        return self._hook_divisor / total\n",
        "        return self._hook_divisor / self._world\n",
        f"{MEANS}::test_gradients_are_those_of_one_process[even-no_sync-0]",
    ),
    Fault(
        "a-hook-divides-what-weights-have-divided",
        "fastsync/reducer/engine.py",
        "weights.start(backwards, 1.0, float(self._group.size()))",
        "weights.start(backwards, 1.0)",
        f"{MEANS}::test_a_hook_reduces_gradients_that_weights_have_scaled[allreduce-False]",
    ),
    Fault(
        "weight-of-the-last-micro-batch-lost",
        WEIGHTS,
        "self.total = self.total + other.total",
        "self.total = self.total or other.total",
        f"{MEANS}::test_gradients_are_those_of_one_process[even-no_sync-0]",
    ),
    Fault(
        "weights-kept-for-the-next-step",
        WEIGHTS,
        "        later = self._later\n        self._forget()\n",
        "        later = self._later\n        self._given.count = 0\n",
        f"{MEANS}::test_gradients_are_those_of_one_process[even-no_sync-0]",
    ),
    Fault(
        "earlier-mean-counted-by-every-rank",
        WEIGHTS,
        "average.mul_(last.weight / copies)",
        "average.mul_(last.weight)",
        f"{MEANS}::test_gradients_are_those_of_one_process[even-every-0]",
    ),
    Fault(
        "mean-of-a-group-divided-again",
        "fastsync/reducer/engine.py",
        "parts[index] = its.divisor / len(its.ranks)",
        "parts[index] = 1.0",
        "tests/ddp/test_groups.py::test_backwards_add_to_a_sum_with_a_divisor",
    ),
    Fault(
        "part-of-a-mean-taken-after-the-module-added-to-it",
        "fastsync/reducer/group_means.py",
        "lambda _, index=index: take(index)",
        "lambda _, index=index: None",
        "tests/ddp/test_groups.py::test_backwards_add_to_a_sum_with_a_divisor",
    ),
    Fault(
        "part-of-a-mean-left-by-a-rank-without-use",
        "fastsync/reducer/group_means.py",
        "        for index in held:\n            self._take(index)\n",
        "",
        "tests/ddp/test_groups.py::test_backwards_add_to_a_sum_with_a_divisor",
    ),
    Fault(
        "part-of-a-mean-without-use-not-averaged",
        "csrc/reducer/reducer.cpp",
        "use_parts(weighing_.start(backwards_));",
        "weighing_.start(backwards_);",
        "tests/ddp/test_groups.py::test_backwards_add_to_a_sum_with_a_divisor",
    ),
    Fault(
        "part-of-a-mean-changes-a-static-graph",
        "csrc/reducer/reducer.cpp",
        "param.part_alone = !param.arrived();",
        "param.part_alone = false;",
        "tests/ddp/test_groups.py::test_a_gradient_without_use_changes_no_static_graph",
    ),
    Fault(
        "earlier-mean-of-shards-not-multiplied",
        WEIGHTS,
        "            average.mul_(earlier / total)\n        return self._hook_divisor",
        "            average.mul_(1.0)\n        return self._hook_divisor",
        f"{MEANS}::test_gradients_are_those_of_one_process[even-no_sync-2]",
    ),
    Fault(
        "missing-weight-unnoticed",
        WEIGHTS,
        "if self._given.count < backwards:",
        "if self._given.count < 0:",
        f"{MEANS}::test_mistakes_are_errors_on_every_rank_that_name_the_ranks[missing-0]",
    ),
    Fault(
        "mean-of-units-over-ranks",
        "fastsync/fsdp/context.py",
        "unit.start_reduce(self._scale)",
        "unit.start_reduce()",
        f"{UNIT_MEANS}::test_gradients_are_those_of_one_process[even-local-plain]",
    ),
    Fault(
        "ranks-without-inputs-say-that-they-gave-no-weight",
        WEIGHTS,
        "self._share(_Status.ABSENT)",
        "self._share(_Status.NONE)",
        f"{MEANS}::test_ranks_without_inputs_weigh_nothing",
    ),
    Fault(
        "weights-of-cleared-gradients-counted",
        WEIGHTS,
        "        if accumulated and cleared:",
        "        if False and cleared:",
        f"{MEANS}::test_weights_of_gradients_that_are_dropped_do_not_count[cleared]",
    ),
    Fault(
        "unused-parameters-of-an-earlier-mean-stay-multiplied",
        "csrc/reducer/reducer.cpp",
        "use_parts(weighing_.begin_backward(accumulated));",
        "weighing_.begin_backward(accumulated);",
        f"{MEANS}::test_parameters_without_use_stay_in_the_mean[2-False]",
    ),
    Fault(
        "weights-on-a-device-ignored",
        "csrc/kernels/scale.h",
        "return on_device == nullptr ? value : *on_device;",
        "return value;",
        "tests/simulated/test_simulated_features.py::test_weighted_results_are_the_cpus[weights]",
    ),
    # --- groups
    Fault(
        "group-divided-by-all-ranks",
        PARAM_GROUPS,
        "divisor = float(len(ranks)) if",
        "divisor = float(len(all_ranks)) if",
        f"{GROUPS}::test_means_and_used_flags_are_those_of_the_group[mean]",
    ),
    Fault(
        "group-averaged-over-all-ranks",
        "csrc/reducer/reducer.cpp",
        "routes(specs[b].group)",
        "routes(0)",
        f"{GROUPS}::test_means_and_used_flags_are_those_of_the_group[mean]",
    ),
    Fault(
        "used-flags-in-the-bucket-of-another-group",
        "fastsync/reducer/buckets.py",
        "spec.codec, spec.group, spec.local)",
        "spec.codec, spec.local)",
        f"{GROUPS}::test_means_and_used_flags_are_those_of_the_group[one-rank]",
    ),
    Fault(
        "votes-of-a-group-alone",
        "csrc/reducer/reducer.cpp",
        "if (last->group() == 0) voted = last;",
        "voted = last;",
        f"{GROUPS}::test_all_ranks_have_one_plan_whatever_their_orders",
    ),
    Fault(
        "groups-launched-in-each-ranks-own-order",
        "fastsync/reducer/agreement.py",
        "return [i for i in order if i >= 0], 1e-9 * nanoseconds",
        "return list(mine.order), 1e-9 * nanoseconds",
        f"{GROUPS}::test_all_ranks_have_one_plan_whatever_their_orders",
    ),
    Fault(
        "group-replicated-over-all-ranks",
        "fastsync/ddp/fast_ddp.py",
        "self.parameters_to_ignore = self._ignored.union(*(names for _, names in self._apart()))",
        "self.parameters_to_ignore = self._ignored.union()",
        f"{GROUPS}::test_a_group_replicates_from_its_first_rank",
    ),
    Fault(
        "buffers-of-a-group-broadcast-over-all-ranks",
        "fastsync/ddp/buffers.py",
        "if group_of.get(id(b), rest) is group]",
        "if rest is group]",
        f"{GROUPS}::test_a_group_replicates_from_its_first_rank",
    ),
    Fault(
        "bucket-of-one-rank-not-divided",
        "csrc/transport/choose.cpp",
        "if (!routes.communicate() && spec.group == 0)",
        "if (!routes.communicate())",
        f"{GROUPS}::test_a_group_of_one_rank_divides_too[fp32-2]",
    ),
    Fault(
        "parameter-in-two-groups-accepted",
        PARAM_GROUPS,
        "if name in owner:",
        "if name in ():",
        f"{GROUPS}::test_mistakes_are_errors_on_every_rank",
    ),
    Fault(
        "partly-overlapping-groups-accepted",
        PARAM_GROUPS,
        "if theirs != mine:",
        "if not theirs:",
        f"{GROUPS}::test_mistakes_are_errors_on_every_rank",
    ),
    Fault(
        "norm-counts-a-group-once-per-rank",
        "fastsync/zero/gradient_norms.py",
        "sum(squares.common / ranks for",
        "sum(squares.common for",
        f"{GROUPS}::test_a_norm_counts_each_parameter_once[2.0-dtype0]",
    ),
    Fault(
        "nan-known-in-its-group-alone",
        "fastsync/ddp/nonfinite.py",
        "for i in sorted({i for its in everyones for i in its})}",
        "for i in sorted(given)}",
        f"{GROUPS}::test_nan_in_a_group_skips_the_step_of_all_ranks",
    ),
    Fault(
        "overflow-known-in-its-group-alone",
        "fastsync/ddp/nonfinite.py",
        "if any(id(param) in self._ours",
        "if any(id(param) in ()",
        f"{GROUPS}::test_an_overflow_in_a_group_leaves_out_the_step_of_all_ranks",
    ),
    Fault(
        "averages-of-local-tensors-lost-on-ranks-without-use",
        "fastsync/reducer/local_gradients.py",
        "                param.grad = make_dtensor(grad, spec_of(param))\n",
        "                pass\n",
        f"{DTENSORS}::test_layers_that_one_replica_uses_get_half_of_its_gradient",
    ),
    Fault(
        "gradients-of-dtensors-as-before-the-forward",
        "fastsync/reducer/engine.py",
        "        its.begin()\n",
        "",
        f"{DTENSORS}::test_gradients_that_change_after_the_forward_are_those_of_plain_tensors",
    ),
    Fault(
        "frozen-dtensors-not-watched",
        "fastsync/reducer/local_gradients.py",
        "if param.is_floating_point() or param.is_complex():",
        "if param.requires_grad:",
        f"{DTENSORS}::test_one_that_is_unfrozen_after_wrapping_is_averaged",
    ),
    Fault(
        "buckets-filled-by-a-ranks-own-parts",
        "fastsync/reducer/engine.py",
        "counted = even_numel(param.tensor) if local else None",
        "counted = None",
        f"{DTENSORS}::test_parts_of_unequal_size_fill_buckets_alike",
    ),
    Fault(
        "different-parts-of-a-dtensor-averaged",
        "fastsync/ddp/request.py",
        "intersection(average)) > 1:",
        "intersection(average)) > 9:",
        f"{DTENSORS}::test_ranks_that_have_different_parts_do_not_average_them[all-ranks]",
    ),
    Fault(
        "norm-of-a-ranks-own-parts",
        "fastsync/zero/gradient_norms.py",
        "mesh_groups(param, cut=True), []",
        "(), []",
        f"{DTENSORS}::test_a_norm_counts_each_part_once[2.0]",
    ),
    Fault(
        "norm-counts-a-dtensor-once-per-part",
        "fastsync/ddp/ddp_objects.py",
        "count *= 1 + len(others.difference(its.ranks))",
        "count *= 1",
        f"{DTENSORS}::test_experts_beside_tensor_parallelism_are_those_of_one_process[2-whole]",
    ),
    Fault(
        "dtensors-left-where-they-were",
        "fastsync/zero/sharded_optimizer.py",
        "        engine.locals.move()\n",
        "",
        f"{ZERO_DTENSORS}::test_weights_are_those_of_stage_0_and_of_one_process[1-adamw]",
    ),
    Fault(
        "gathered-gradients-of-dtensors-dropped",
        "fastsync/zero/gradient_proxies.py",
        "            set_local(dtensor.grad, whole)\n",
        "            pass\n",
        f"{ZERO_DTENSORS}::test_gradients_are_what_they_are_at_stage_0[1]",
    ),
    Fault(
        "coupled-steps-on-parts-of-dtensors",
        "fastsync/zero/sharded_optimizer.py",
        "if cut and _unit_for(",
        "if not cut and _unit_for(",
        f"{DTENSOR_STATES}::test_what_would_step_otherwise_is_refused_on_all_ranks[muon]",
    ),
    Fault(
        "all-replicas-of-a-dtensor-save-their-parts",
        "fastsync/_torch/dtensors.py",
        "return LocalPlace(shape, stride, offsets, writes)",
        "return LocalPlace(shape, stride, offsets, True)",
        f"{DTENSOR_STATES}::test_a_mesh_may_contain_the_replicas[unequal parts-1]",
    ),
    Fault(
        "weights-of-a-rank-that-skips-counted",
        WEIGHTS,
        "self._share(_Status.ABSENT if skips else status)",
        "self._share(status)",
        f"{SKIPS}::test_ranks_that_are_left_make_no_mean[none]",
    ),
    Fault(
        "sent-gradients-of-a-skipping-rank-not-weighed",
        "fastsync/ddp/skipping.py",
        'self._sent = core.stats()["collectives"] - sent',
        "self._sent = 0",
        f"{SKIPS}::test_weights_are_those_of_the_batches_that_count[3-schedule13-options13]",
    ),
    Fault(
        "scale-of-frozen-param-groups-awaited",
        "fastsync/fsdp/context.py",
        "self._scale is None and unit.trains:",
        "self._scale is None:",
        f"{UNIT_MEANS}::test_frozen_param_groups_have_no_part_in_the_mean[most0]",
    ),
    # --- parts of batches by speed
    Fault(
        "parts-do-not-add-up",
        SHARES,
        "for rank in order[: total - sum(parts)]:",
        "for rank in order[:0]:",
        f"{SHARED}::test_parts_are_proportional_and_whole",
    ),
    Fault(
        "speeds-of-the-wrong-ranks",
        SHARES,
        "self._changes.append(_Speeds(int(max(drawn)), speeds))",
        "self._changes.append(_Speeds(int(max(drawn)), speeds[::-1]))",
        f"{SHARED}::test_samples_are_trained_once_with_gradients_of_one_process[0]",
    ),
    Fault(
        "new-parts-of-batches-drawn-already",
        SHARES,
        "_Speeds(int(max(drawn)), speeds)",
        "_Speeds(int(min(drawn)), speeds)",
        f"{SHARED}::test_samples_are_trained_once_with_gradients_of_one_process[ahead]",
    ),
    Fault(
        "samples-of-a-batch-that-was-drawn-ahead",
        SHARES,
        "self._measured.append(self._untrained.popleft() / seconds)",
        "self._measured.append(self._untrained.pop() / seconds)",
        f"{SHARED}::test_samples_are_trained_once_with_gradients_of_one_process[ahead]",
    ),
    Fault(
        "waiting-for-the-sum-of-weights-counts-as-work",
        "csrc/reducer/reducer.cpp",
        "  const Lap lap = log_.waiting();  // for the rank that begins its backward last\n",
        "",
        f"{SHARED}::test_waiting_for_a_slow_rank_makes_no_rank_slow[0]",
    ),
    Fault(
        "divided-batches-without-weights",
        WEIGHTS,
        "if _are_plain(statuses) and self.divides is None:",
        "if _are_plain(statuses):",
        f"{SHARED}::test_mistakes_are_errors_on_every_rank[weightless]",
    ),
    # --- fastsync/reducer
    Fault(
        "removed-layer-taken-for-replaced",
        "fastsync/reducer/unused_parameters.py",
        "if all(id(tensor) in wrapped for tensor in now.values()):",
        "if False:",
        "tests/conformance/test_layers_that_change.py::test_a_layer_is_removed[zero0]",
    ),
    Fault(
        "buckets-in-reverse-order",
        "fastsync/reducer/buckets.py",
        "key=lambda group: group.latest)",
        "key=lambda group: -group.latest)",
        "tests/ddp/test_bucket_plan.py::test_dtypes_and_devices_do_not_mix",
    ),
    Fault(
        "bucket-cap-exceeded-by-one",
        "fastsync/reducer/buckets.py",
        "full = group.nbytes >= policy.limit(",
        "full = group.nbytes > policy.limit(",
        "tests/ddp/test_bucket_plan.py"
        "::test_a_bucket_is_closed_by_the_gradient_that_reaches_its_cap",
    ),
    Fault(
        "small-buckets-coded",
        "fastsync/reducer/buckets.py",
        "return first.codec if not small and",
        "return first.codec if",
        "tests/ddp/test_bucket_plan.py::test_small_buckets_stay_as_they_are",
    ),
    Fault(
        "first-plan-in-order-of-registration",
        "fastsync/reducer/engine.py",
        "order = [i for i in reversed(range(len(params))) if params[i].tensor.requires_grad]",
        "order = [i for i in range(len(params)) if params[i].tensor.requires_grad]",
        "tests/ddp/test_launch_order.py::test_overlap_from_the_first_step",
    ),
    Fault(
        "each-rank-follows-its-own-order",
        "fastsync/reducer/agreement.py",
        "return [i for i in order if i >= 0], 1e-9 * nanoseconds",
        "return list(mine.order), 1e-9 * nanoseconds",
        "tests/ddp/test_launch_order.py::test_the_second_plan_is_rank_0s_order",
    ),
    Fault(
        "planned-is-what-all-ranks-train",
        "fastsync/reducer/agreement.py",
        "network.nbytes :].amax(dim=0)",
        "network.nbytes :].amin(dim=0)",
        "tests/ddp/test_bucket_plan.py"
        "::test_any_rank_trains_the_first_one_orders_and_the_fastest_has_measured",
    ),
    Fault(
        "buffer-not-divisible-by-ranks",
        "fastsync/reducer/bucket_layout.py",
        "total = align_up(max(end, 1), math.lcm(world_size, ALIGNMENT))",
        "total = align_up(max(end, 1), ALIGNMENT)",
        "tests/ddp/test_flat_layout.py::test_invariants[8]",
    ),
    Fault(
        "residuals-of-former-ranks-lost",
        "fastsync/reducer/sync_checkpoint.py",
        "mine = given[rank::world]",
        "mine = given[rank : rank + 1]",
        "tests/wire/test_error_feedback.py::test_another_number_of_ranks_keeps_the_sum[3-2]",
    ),
    Fault(
        "wrong-step-number-after-a-restart",
        "fastsync/reducer/engine.py",
        "self.core.resume(progress.steps)",
        "self.core.resume(progress.steps + 1)",
        "tests/wire/test_error_feedback.py::test_a_restart_changes_no_bit[int4, at random-4]",
    ),
    Fault(
        "residuals-dropped-that-are-wanted",
        "fastsync/reducer/engine.py",
        "if p.name not in shapes])",
        "if p.name in shapes])",
        "tests/wire/test_wire_steps.py"
        "::test_a_wire_without_feedback_frees_residuals_and_one_with_it_keeps_them",
    ),
    Fault(
        "ranks-round-by-the-same-random-numbers",
        "fastsync/reducer/core.py",
        'f"{sender.wire.seed} {sender.rank} {index}"',
        'f"{sender.wire.seed} {index}"',
        "tests/fsdp/test_fsdp_wires.py::test_stochastic_rounding_differs_by_rank_and_by_unit",
    ),
    Fault(
        "slow-ranks-are-a-majority",
        "fastsync/reducer/step_timing.py",
        "candidates = gaps[: ranks // 2]",
        "candidates = gaps",
        "tests/faults/test_slow_ranks.py"
        "::test_nobody_is_named_where_all_wait_alike_or_most_wait_for_one_another[waits4]",
    ),
    # --- fastsync/config, fastsync/wire
    Fault(
        "first-cap-for-all-buckets",
        "fastsync/config/policy.py",
        "cap = self.caps[min(closed, len(self.caps) - 1)]",
        "cap = self.caps[0]",
        "tests/ddp/test_bucket_plan.py"
        "::test_caps_count_buckets_and_the_last_one_holds_for_the_rest",
    ),
    Fault(
        "stage-2-accumulates-whole-gradients",
        "fastsync/config/policy.py",
        "return self.zero.stage == 2 and self.shardable",
        "return False",
        "tests/zero/test_zero_gradients.py::test_stages_differ_while_gradients_accumulate",
    ),
    Fault(
        "features-that-exclude-each-other-accepted",
        "fastsync/config/compatibility.py",
        "if first and second:",
        "if first and second and row.first == row.second:",
        "tests/ddp/test_compatibility.py::test_every_row_is_refused_with_its_reason",
    ),
    Fault(
        "no-error-feedback-by-default",
        "fastsync/wire/formats.py",
        "return codec.error_feedback\n",
        "return False\n",
        "tests/wire/test_wire.py::test_the_residuals_are_what_the_averages_lack[gather]",
    ),
    Fault(
        "override-of-one-for-all",
        "fastsync/wire/formats.py",
        "if fnmatch.fnmatchcase(name, pattern):",
        "if pattern:",
        "tests/wire/test_wire.py::test_overrides_by_name",
    ),
    Fault(
        "warmup-left-out",
        "fastsync/reducer/engine.py",
        "return self.core.steps() < self.policy.wire.warmup_steps",
        "return False",
        "tests/wire/test_wire.py::test_warmup_steps_travel_as_they_are",
    ),
    Fault(
        "weak-elements-grow-to-half-the-largest",
        "fastsync/wire/formats.py",
        "weak = kept.abs() < scales / 4",
        "weak = kept.abs() < 0",
        f"{CHUNKED}::test_values_are_those_of_the_twin[9000]",
    ),
    Fault(
        "places-in-a-chunk-cut-to-a-byte",
        "fastsync/wire/formats.py",
        "low.long() + 256 * _unpacked(high, 4)",
        "low.long() + 0 * _unpacked(high, 4)",
        f"{CHUNKED}::test_a_step_is_the_sum_of_what_the_twin_keeps_of_each_rank[2]",
    ),
    # --- fastsync/ddp
    Fault(
        "buffers-not-broadcast",
        "fastsync/ddp/fast_ddp.py",
        "if not usual or (watch.stale and self.process_group.size() > 1):",
        "if not usual:",
        "tests/ddp/test_buffers.py::test_a_part_that_still_trains_is_synchronised",
    ),
    Fault(
        "buffers-broadcast-at-every-forward",
        "fastsync/ddp/fast_ddp.py",
        "        watch.stale = False\n",
        "",
        "tests/ddp/test_buffers.py::test_nothing_is_sent_where_nothing_can_have_changed",
    ),
    Fault(
        "unused-parameters-never-an-error",
        "fastsync/ddp/fast_ddp.py",
        "fail_on_unused=find_unused_parameters is False and not static_graph,",
        "fail_on_unused=False,",
        "tests/ddp/test_unused.py::test_an_error_where_it_was_refused",
    ),
    Fault(
        "join-divides-by-the-wrong-ranks",
        "fastsync/ddp/ddp_objects.py",
        "self._initial_world if use_initial_world_size else active",
        "active if use_initial_world_size else self._initial_world",
        "tests/ddp/test_unusual_backwards.py::test_uneven_inputs_under_join[False-25]",
    ),
    Fault(
        "parameters-stay-narrow-after-forward",
        "fastsync/reducer/engine.py",
        "            yield\n        finally:\n            self.precision.end_forward()",
        "            yield\n        finally:\n            pass",
        "tests/ddp/test_mixed_precision.py"
        "::test_parameters_are_in_full_precision_outside_of_forward_and_backward",
    ),
    Fault(
        "steps-with-nan",
        "fastsync/ddp/nonfinite.py",
        "return (optimizer_proxy(optimizer, groups), *args[1:])",
        "return args",
        "tests/faults/test_nonfinite.py::test_a_bad_step_is_left_out_on_every_rank[static]",
    ),
    Fault(
        "next-rank-blamed-for-nan",
        "fastsync/ddp/nonfinite.py",
        "for r, one in enumerate(of_rank) if one.given]",
        "for r, one in enumerate(of_rank, start=1) if one.given]",
        "tests/faults/test_nonfinite.py::test_an_error_names_parameter_and_rank_on_every_rank[0]",
    ),
    Fault(
        "half-of-the-ranks-are-a-majority",
        "fastsync/ddp/replica_check.py",
        "known = 2 * count > len(digests)",
        "known = 2 * count >= len(digests)",
        "tests/faults/test_replicas.py::test_two_ranks_have_no_majority[True]",
    ),
    Fault(
        "ranks-of-a-group-are-compared-with-others",
        "fastsync/ddp/replica_check.py",
        "for ranks in self._parts[self._groups[index]]:",
        "for ranks in self._parts[0]:",
        "tests/faults/test_replicas.py::"
        "test_parameters_of_a_group_are_compared_among_its_ranks[2.weight-1-0]",
    ),
    Fault(
        "repair-without-the-optimizer",
        "fastsync/ddp/replica_check.py",
        "            self._repair_states(finding, is_wrong)",
        "            pass",
        "tests/faults/test_replicas.py::test_the_optimizers_state_is_repaired_too[AdamW]",
    ),
    Fault(
        "skipped-ranks-count-as-zeros",
        "fastsync/ddp/skipping.py",
        "param.tensor.grad.mul_(factor)",
        "param.tensor.grad.mul_(1.0)",
        "tests/faults/test_skipped_steps.py"
        "::test_weights_are_those_of_the_batches_that_count[2-schedule0-options0]",
    ),
    Fault(
        "hook-runs-beside-a-narrow-wire",
        "fastsync/ddp/fast_ddp.py",
        "        compatibility.check(Setup(self._policy, hook=True))\n",
        "",
        "tests/ddp/test_bad_input.py::test_a_communication_hook_beside_a_narrow_wire",
    ),
    # --- fastsync/elastic: survivors, and ranks that come back
    Fault(
        "survivors-follow-the-one-ahead",
        "fastsync/faults/survivors.py",
        "steps = min(at.steps for at in states.values())",
        "steps = max(at.steps for at in states.values())",
        "tests/elastic/test_survivors.py::test_decisions[states3-8-True]",
    ),
    Fault(
        "averages-taken-that-some-lack",
        "fastsync/faults/survivors.py",
        "takes = all(at.complete",
        "takes = any(at.complete",
        "tests/elastic/test_survivors.py::test_decisions[states1-7-False]",
    ),
    Fault(
        "wrong-step-number-in-a-served-state",
        "fastsync/reducer/sync_checkpoint.py",
        '"steps": engine.core.steps(),',
        '"steps": engine.core.steps() + 1,',
        "tests/wire/test_error_feedback.py::test_a_restart_changes_no_bit[int4, at random-4]",
    ),
    Fault(
        "a-share-without-second-holder",
        "fastsync/zero/partition.py",
        "return (self.mine, self.before) if self.doubled and self.size > 1 else (self.mine,)",
        "return (self.mine,)",
        "tests/zero/test_shard_layout.py::test_a_share_has_two_holders_where_ranks_may_die",
    ),
    # --- fastsync/zero
    Fault(
        "gradients-beside-those-that-are-spread-not-scaled",
        "fastsync/zero/gradient_proxies.py",
        "        return grad\n    return grad.share.piece",
        "        return grad.clone()\n    return grad.share.piece",
        f"{GROUPS}::test_all_gradients_are_scaled_where_some_ranks_have_fewer[1]",
    ),
    Fault(
        "parameters-tied-later",
        "fastsync/zero/sharded_optimizer.py",
        'check_untied(((p.name, local) for local, p in self._pairs()), "or use zero=0")',
        "pass",
        "tests/conformance/test_parameters_in_memory.py"
        "::test_parameters_that_share_memory_later[zero1-small]",
    ),
    Fault(
        "steps-on-gradients-nobody-averaged",
        "fastsync/zero/unaveraged.py",
        "if everyones != mine * engine.group.size():",
        "if everyones < mine:",
        "tests/conformance/test_unaveraged_gradients.py"
        "::test_ranks_that_would_train_apart_get_an_error[twice_through_one_graph-zero1]",
    ),
    Fault(
        "shard-offset-off-by-one",
        "fastsync/zero/partition.py",
        "begin = max(0, rank * region - offset)",
        "begin = max(0, rank * region - offset + 1)",
        "tests/zero/test_shard_layout.py"
        "::test_every_element_has_one_owner_and_one_place[numels4-2-cut_by_elements]",
    ),
    Fault(
        "optimizer-state-of-the-wrong-slice",
        "fastsync/zero/flat_buffer.py",
        "begin = full.storage_offset() + piece.begin",
        "begin = full.storage_offset()",
        "tests/zero/test_zero.py::test_state_dicts_are_those_of_the_whole_optimizer[stages0]",
    ),
    Fault(
        "last-buffer-of-a-step-not-sent",
        "fastsync/zero/sharded_optimizer.py",
        "self._end(self.buffers[-1:] if _steps_by_parameter(optimizer) else self.buffers)",
        "self._end([] if _steps_by_parameter(optimizer) else self.buffers)",
        "tests/zero/test_zero.py::test_weights_are_those_of_the_whole_optimizer[2-adamw]",
    ),
    Fault(
        "a-buffer-without-a-step",
        "fastsync/zero/sharded_optimizer.py",
        "            for buffers in ahead:\n",
        "            for buffers in ahead[1:]:\n",
        "tests/zero/test_zero_partial_steps.py::test_steps_in_turns_are_one_step[adamw]",
    ),
    Fault(
        "clip-norm-of-this-ranks-share",
        "fastsync/zero/gradient_norms.py",
        "total += squares.exchange.sum(_PLACE, squares.owned)",
        "total += squares.owned",
        "tests/zero/test_squared_norms.py::test_changes_in_between_count[{'zero': 1}]",
    ),
    Fault(
        "no-fp32-masters",
        "fastsync/zero/sharded_optimizer.py",
        "masters = wire is not None or (self._policy.master_weights and dtype in NARROW)",
        "masters = wire is not None",
        "tests/zero/test_zero_masters.py::test_state_is_fp32_and_each_rank_has_its_share",
    ),
    Fault(
        "masters-ignore-what-scripts-write",
        "fastsync/zero/flat_buffer.py",
        "            master[written] = elements[written].float()",
        "            pass",
        "tests/zero/test_zero_masters.py::test_masters_follow_what_is_written_to_parameters",
    ),
    Fault(
        "unchanged-parameters-rounded",
        "fastsync/zero/parameter_codes.py",
        "payload[rank, self._flags : self._flags + len(masters)] = changed",
        "payload[rank, self._flags : self._flags + len(masters)] = 1",
        "tests/zero/test_zero_parameters.py"
        "::test_what_no_step_changes_and_what_is_no_smaller_stays_as_it_is[int8]",
    ),
    Fault(
        "checkpoint-rectangles-in-another-order",
        "fastsync/zero/dcp_chunks.py",
        "order = sorted(dims, key=lambda dim: -strides[dim])",
        "order = list(dims)",
        "tests/zero/test_shard_layout.py"
        "::test_parts_of_a_tensor_make_up_the_whole_in_any_memory_format",
    ),
    # --- fastsync/sync
    Fault(
        "outer-momentum-lost",
        "fastsync/sync/fragments.py",
        "self._momentum.mul_(momentum).add_(average)",
        "self._momentum.copy_(average)",
        "tests/sync/test_modes.py::test_parameters_are_those_of_the_oracle[2-adamw]",
    ),
    Fault(
        "differences-without-error-feedback",
        "fastsync/sync/exchange.py",
        "flat.sub_(codes.decode(mine))",
        "flat.zero_()",
        "tests/sync/test_modes.py::test_parameters_are_those_of_the_oracle[2-adamw]",
    ),
    Fault(
        "own-change-lost-in-a-delayed-average",
        "fastsync/sync/fragments.py",
        "self.params.pack().sub_(self._sent).add_(average)",
        "average",
        "tests/sync/test_modes.py::test_parameters_are_those_of_the_oracle[2-adamw]",
    ),
    Fault(
        "fragments-sent-a-turn-early",
        "fastsync/sync/schedule.py",
        "return (fragment + 1) * self.every // self.fragments",
        "return fragment * self.every // self.fragments",
        "tests/sync/test_schedule.py::test_each_fragment_is_sent_once_in_a_round[4]",
    ),
    Fault(
        "merged-without-the-comparison",
        "fastsync/sync/fragments.py",
        "            self._check()\n            average = pending.wait()\n",
        "            average = pending.wait()\n",
        f"{ROUNDS}::test_ranks_that_would_silently_differ[left out, overlapped]",
    ),
    Fault(
        "outer-state-on-every-rank-of-a-part",
        "fastsync/sync/fragments.py",
        "    if exchange.sends:\n",
        "    if exchange is not None:\n",
        f"{ROUNDS}::test_one_rank_of_a_part_holds_the_outer_state",
    ),
    Fault(
        "steps-left-out-not-compared",
        "fastsync/sync/rounds.py",
        "str(self._owner.forwards),",
        '"",',
        f"{ROUNDS}::test_ranks_that_would_silently_differ[left out]",
    ),
    Fault(
        "gradients-sent-within-a-round",
        "fastsync/ddp/fast_ddp.py",
        "            sync = self.require_backward_grad_sync and not reducer.local\n",
        "            sync = self.require_backward_grad_sync\n",
        f"{ROUNDS}::test_nothing_is_sent_between_rounds",
    ),
    Fault(
        "residual-not-in-the-checkpoint",
        "fastsync/sync/fragments.py",
        'return flats if residual is None else {**flats, "residual": residual}',
        "return flats",
        f"{ROUNDS}::test_a_checkpoint_within_a_round_goes_on_with_the_same_bits[diloco]",
    ),
    Fault(
        "outer-parameters-of-before-the-warmup",
        "fastsync/sync/rounds.py",
        "                fragment.begin_rounds()",
        "                pass",
        "tests/sync/test_modes.py::test_parameters_are_those_of_the_oracle[2-adamw]",
    ),
    Fault(
        "buffers-stay-apart",
        "fastsync/sync/rounds.py",
        "            if ends:\n                self._on_round()\n",
        "            if not ends:\n                self._on_round()\n",
        f"{ROUNDS}::test_buffers_are_rank_0s_at_the_end_of_a_round",
    ),
    Fault(
        "outer-parameters-rounded",
        "fastsync/sync/fragments.py",
        "self.params.rounded(self._outer) - self.params.pack()",
        "self._outer - self.params.pack()",
        f"{ROUNDS}::test_outer_parameters_are_fp32_beside_parameters_of_bf16",
    ),
    Fault(
        "mean-over-the-ranks-of-the-start",
        "fastsync/sync/exchange.py",
        "        return self._between.size()\n",
        "        self._began = getattr(self, '_began', self._between.size())\n"
        "        return self._began\n",
        f"{MEMBERS}[average-coded]",
    ),
    Fault(
        "merged-without-a-vote",
        "fastsync/ddp/elastic_training.py",
        "            self.rounds.exchange.vote()\n",
        "",
        f"{MEMBERS}[arrived-on-one]",
    ),
    Fault(
        "merged-before-others-have-arrived",
        "fastsync/sync/fragments.py",
        "        self._pending, self._check = None, lambda: None\n",
        "        if self._pending is not None and self._pending._arrived is not None:\n"
        "            self._update(self._pending._arrived, False)\n"
        "        self._pending, self._check = None, lambda: None\n",
        f"{MEMBERS}[arrived-on-one-fragments]",
    ),
    Fault(
        "residual-counted-twice",
        "fastsync/sync/fragments.py",
        "self._lost = difference.add_(self._residual)",
        "self._lost = self._residual = difference.add_(self._residual)",
        f"{MEMBERS}[average-coded]",
    ),
    Fault(
        "joined-without-outer-state",
        "fastsync/sync/rounds.py",
        'kept = {kind: held for kind, held in optimizer["kept"].items() if kind != "residual"}',
        "kept = {}",
        f"{MEMBERS}[joins-coded]",
    ),
    Fault(
        "joined-with-the-residual-of-another",
        "fastsync/sync/rounds.py",
        ' if kind != "residual"}',
        "}",
        f"{MEMBERS}[joins-coded]",
    ),
    Fault(
        "late-rank-goes-on-with-what-it-has",
        "fastsync/ddp/rejoin.py",
        "        if not elastic.left_out:\n            return\n",
        "        if elastic.left_out or not elastic.left_out:\n            return\n",
        f"{MEMBERS}[late-fragment]",
    ),
    Fault(
        "parameters-averaged-with-one-part-alone",
        "fastsync/reducer/process_groups.py",
        "cross = tuple(part[place] for part in dict.fromkeys(parts.values()))",
        "cross = tuple(part[place] for part in [mine])",
        f"{PARTS}[streaming-int4-0]",
    ),
    Fault(
        "average-in-the-step-that-sends-it",
        "fastsync/timeline/data.py",
        "(number, *on_their_way.pop(index)[1:])",
        "on_their_way.pop(index)",
        "tests/timeline/test_timeline.py::test_averages_of_rounds_are_recorded[streaming]",
    ),
    Fault(
        "averages-not-counted",
        "fastsync/ddp/elastic_training.py",
        "        self.averages += 1\n",
        "",
        f"{MEMBERS}[joins-coded]",
    ),
    Fault(
        "hidden-traffic-waited-for",
        "fastsync/planner/scenario.py",
        "seconds - schedule.overlap * alone",
        "seconds",
        "tests/sync/test_costs.py::test_what_runs_while_steps_do_is_not_waited_for",
    ),
    Fault(
        "codes-of-one-rank-planned",
        "fastsync/planner/scenario.py",
        "world * codec.coded_bytes(numel)",
        "codec.coded_bytes(numel)",
        "tests/sync/test_costs.py::test_bytes_are_those_that_ranks_send[int8]",
    ),
    # --- fastsync/fsdp
    Fault(
        "state-of-a-step-whose-closure-ran-first-lost",
        "fastsync/fsdp/context.py",
        "if self.states[0].is_root is None:",
        "if False:",
        "tests/conformance/test_optimizer_hooks.py::test_the_first_forward_is_that_of_a_closure",
    ),
    Fault(
        "prefetched-unit-not-gathered-after-a-step",
        "fastsync/fsdp/context.py",
        "            unit.stale = True\n",
        "",
        "tests/fsdp/test_fsdp_control_flow.py"
        "::test_no_forward_computes_with_weights_of_before_a_step[True]",
    ),
    Fault(
        "gradients-set-by-hand-not-stepped-on",
        "fastsync/fsdp/context.py",
        "                unit.take_set_gradients()\n",
        "                unit.take_script_gradients()\n",
        "tests/conformance/test_gradients_by_hand.py::test_gradients_that_a_script_computes"
        "[after a forward-one unit]",
    ),
    Fault(
        "no-unit-is-prefetched",
        "fastsync/fsdp/context.py",
        "            self.prefetch_forward(self._order[at + 1])",
        "            pass",
        "tests/fsdp/test_fsdp_prefetch.py::test_one_is_gathered_ahead_and_what_a_script_names",
    ),
    Fault(
        "post-hook-of-a-reduction-dropped",
        "fastsync/fsdp/param_group.py",
        "            self._call_hook(sums)\n            dtype_shard.deliver(sums)",
        "            dtype_shard.deliver(sums)",
        "tests/fsdp/test_fsdp_methods.py::test_another_divisor_and_a_hook",
    ),
    Fault(
        "write-to-a-gathered-parameter-lost",
        "fastsync/fsdp/param_group.py",
        "                param.check_whole()\n",
        "                pass\n",
        "tests/conformance/test_data_assignment.py"
        "::test_writes_to_gathered_parameters_are_an_error[in place-zero3]",
    ),
    Fault(
        "divisor-of-a-unit-ignored",
        "fastsync/fsdp/param_group.py",
        "scale = 1.0 / (self.switches.divisor or self.place.ranks)",
        "scale = 1.0 / self.place.ranks",
        "tests/fsdp/test_fsdp_methods.py::test_another_divisor_and_a_hook",
    ),
    Fault(
        "replicas-lose-what-they-accumulated",
        "fastsync/fsdp/param_group.py",
        "            sums.add_(dtype_shard.partial)\n",
        "",
        "tests/fsdp/test_fsdp.py::test_replicas_accumulate_before_they_meet",
    ),
    Fault(
        "gradients-of-one-rank-not-owed-by-all",
        "fastsync/fsdp/param_group.py",
        "        self.owes = True\n",
        "",
        "tests/fsdp/test_fsdp_control_flow.py"
        "::test_gradients_that_one_rank_alone_has_kept_are_reduced_by_all",
    ),
    Fault(
        "local-optimizer-state-not-kept",
        "fastsync/fsdp/local_steps.py",
        "                _keep(optimizer, param, local, state.pop(local))",
        "                state.pop(local)",
        "tests/fsdp/test_fsdp_optimizer_step.py::test_bits_are_those_of_steps_on_dtensors[AdamW]",
    ),
    Fault(
        "rows-left-out-of-all-shares",
        "fastsync/fsdp/shard_layout.py",
        "each = math.ceil(length / world)",
        "each = max(1, length // world)",
        "tests/fsdp/test_fsdp.py::test_parameters_and_gradients_are_dtensors_with_global_sizes",
    ),
    Fault(
        "host-reads-before-a-copy-has-arrived",
        "fastsync/fsdp/cpu_offload.py",
        "            self.done.synchronize()\n",
        "            pass\n",
        "tests/fsdp/test_fsdp_offload.py::test_the_host_waits_before_it_reads[each-None]",
    ),
    Fault(
        "share-of-the-next-rank-loaded",
        "fastsync/fsdp/sharded_param.py",
        "begin = min(self.shape.count(0, world) * rank, self.shape.sizes[dim])",
        "begin = min(self.shape.count(0, world) * (world - 1 - rank), self.shape.sizes[dim])",
        "tests/conformance/test_checkpoints.py"
        "::test_goes_on_from_an_unsharded_state[rmsprop-zero3]",
    ),
    Fault(
        "tags-in-the-order-of-first-gathers",
        "fastsync/fsdp/dtype_shard.py",
        "str(self.place.device), self._tag)",
        "str(self.place.device), self.links.next_tag())",
        "tests/conformance/test_one_rank_evaluates.py"
        "::test_ranks_that_run_other_layers_are_an_error_on_every_rank[2-0]",
    ),
    Fault(
        "data-of-the-unsharded-not-compared",
        "fastsync/fsdp/sharded_param.py",
        "return not torch.equal(before, now)",
        "return False",
        "tests/conformance/test_data_assignment.py"
        "::test_writes_to_gathered_parameters_are_an_error[in data-one unit]",
    ),
    Fault(
        "number-of-one-ranks-part",
        "fastsync/_torch/dtensor_handlers.py",
        "op(cast(DTensor, args[0]).full_tensor(), **kwargs)",
        "op(local_of(args[0]).sum(), **kwargs)",
        "tests/conformance/test_parameters_in_memory.py"
        "::test_numbers_of_parameters_and_gradients[fully_shard]",
    ),
    Fault(
        "lost-write-unnoticed",
        "fastsync/_torch/dtensor_handlers.py",
        "if len(addresses) > 1:",
        "if len(addresses) > 2:",
        "tests/conformance/test_data_assignment.py"
        "::test_writes_into_a_part[gradient-random_row-zero3]",
    ),
    # --- fastsync/faults
    Fault(
        "wrong-rank-differs",
        "fastsync/faults/consensus.py",
        "enumerate(statements[1:], start=1)",
        "enumerate(statements[1:])",
        "tests/ddp/test_rank_mismatch.py::test_all_ranks_hear_the_same[more]",
    ),
    Fault(
        "exception-placed-in-its-first-frame",
        "fastsync/faults/exit_reasons.py",
        "return own[-1]",
        "return own[0]",
        "tests/faults/test_signals.py::test_an_exception_is_in_the_last_of_the_scripts_frames",
    ),
    Fault(
        "ranks-that-disagree-seem-to-agree",
        "fastsync/faults/rendezvous.py",
        '"alike" if alike else "unlike"',
        '"alike"',
        "tests/faults/test_rendezvous.py::test_ranks_learn_whether_they_agree",
    ),
    Fault(
        "meeting-ends-before-all-have-come",
        "fastsync/faults/rendezvous.py",
        'if store.add(f"{place}/count", 1) == self._world:',
        'if store.add(f"{place}/count", 1) == self._world - 1:',
        "tests/faults/test_rendezvous.py::test_nobody_goes_on_before_all_have_come",
    ),
    # --- csrc/kernels
    Fault(
        "integers-rounded-down",
        "csrc/kernels/codec_element.h",
        "const float sum = y + kMagic;",
        "const float sum = (y - 0.5f) + kMagic;",
        "tests/zero/test_zero_parameters.py"
        "::test_three_ranks_hold_the_same_rounded_masters[True-int8]",
    ),
    Fault(
        "int4-without-negative-numbers",
        "csrc/kernels/codec_element.h",
        "static_cast<int32_t>((code & 15) ^ 8) - 8",
        "static_cast<int32_t>(code & 15)",
        "tests/wire/test_wire_accuracy.py::test_block_bounds_hold_on_hostile_numbers[normal-int4]",
    ),
    Fault(
        "old-residual-forgotten",
        "csrc/kernels/codec_element.h",
        "finite_or(kAdd ? old + lost : lost, old)",
        "finite_or(lost, old)",
        "tests/wire/test_wire.py::test_the_residuals_are_what_the_averages_lack[two_shot]",
    ),
    Fault(
        "residual-not-sent-later",
        "csrc/kernels/codec_loops.h",
        "x[i] = kResidual ? product + residual[i] : product;",
        "x[i] = product;",
        "tests/wire/test_wire.py::test_error_feedback_lets_nothing_be_lost[gather-fp8_e5m2]",
    ),
    Fault(
        "non-finite-flag-of-the-last-element",
        "csrc/kernels/norm_cpu.cpp",
        "found |= static_cast<uint32_t>(!is_finite(data[i]));",
        "found = static_cast<uint32_t>(!is_finite(data[i]));",
        "tests/faults/test_nonfinite.py"
        "::test_one_element_that_is_not_finite_is_found_anywhere[inf]",
    ),
    Fault(
        "squares-without-the-last-elements",
        "csrc/kernels/norm_cpu.cpp",
        "for (int64_t lane = 0; i + lane < numel; ++lane) add(lanes[lane], data[i + lane]);",
        "",
        "tests/faults/test_nonfinite.py::test_squares_are_those_of_the_plain_sum",
    ),
    Fault(
        "digest-without-the-last-bytes",
        "csrc/kernels/digest_cpu.cpp",
        "rest > 0",
        "rest > 8",
        "tests/faults/test_digests.py::test_any_flipped_bit_changes_it[1]",
    ),
    Fault(
        "sum-without-the-second-rank",
        "csrc/kernels/sum_cpu.cpp",
        "for (size_t r = 1; r < count; ++r) add(",
        "for (size_t r = 2; r < count; ++r) add(",
        "tests/ddp/test_shared_memory.py::test_more_ranks_average_in_their_order[3]",
    ),
    # --- csrc/reducer, csrc/transport
    Fault(
        "sum-instead-of-mean",
        "csrc/reducer/reducer.cpp",
        "how.scale = weighed_ ? scale_ : ops::Scale(routes_.hook ? 1.0 : 1.0 / divisors_[group]);",
        "how.scale = weighed_ ? scale_ : ops::Scale(1.0);",
        "tests/ddp/test_unused.py::test_every_pattern_of_use[options0]",
    ),
    Fault(
        "stale-used-flags",
        "csrc/reducer/reducer.cpp",
        "  for (const auto& param : params_) param->used = param->part_alone = false;\n"
        "  backward_running_ = false;\n"
        "  backwards_ = 0;\n"
        "  log_.count_steps",
        "  backward_running_ = false;\n  backwards_ = 0;\n  log_.count_steps",
        "tests/ddp/test_unused.py::test_what_no_rank_used_keeps_its_bits[options1]",
    ),
    Fault(
        "first-bucket-not-received",
        "csrc/reducer/reducer.cpp",
        "if (!finished) finish(i, used);",
        "if (!finished && i > 0) finish(i, used);",
        "tests/ddp/test_unused.py::test_every_pattern_of_use[options0]",
    ),
    Fault(
        "used-flags-of-other-ranks-ignored",
        "csrc/reducer/bucket.cpp",
        "(flags_travelled && values[i] > 0.0F)",
        "(flags_travelled && values[i] > 1.0F)",
        "tests/ddp/test_unused.py::test_every_pattern_of_use[options0]",
    ),
    Fault(
        "no-vote",
        "csrc/reducer/plan_watch.cpp",
        "vote_ = learned_ && out_of_order_steps_ >= kOutOfOrderSteps &&",
        "vote_ = false && out_of_order_steps_ >= kOutOfOrderSteps &&",
        "tests/ddp/test_launch_order.py::test_a_lasting_change_of_order_is_voted_into_a_new_plan",
    ),
    Fault(
        "buffer-reused-too-early",
        "csrc/transport/flat.cpp",
        "if (flat().defined() && !(spec_.views && buffer_.held_by_others(references()))) return;",
        "if (flat().defined()) return;",
        "tests/ddp/test_gradient_views.py::test_saved_gradients_are_never_overwritten[data]",
    ),
    # --- csrc/codec, csrc/comm, csrc/shm
    Fault(
        "topk-sends-again-what-it-has-sent",
        "csrc/codec/coder.cpp",
        "flat.index_add_(0, terms.positions, terms.values, -1);",
        "",
        "tests/wire/test_topk.py::test_the_residuals_are_what_the_averages_lack[topk-auto]",
    ),
    Fault(
        "own-part-read-for-that-of-others",
        "csrc/shm/channel.cpp",
        "return segments_[rank]->data() + other.offset",
        "return segments_[rank_]->data() + other.offset",
        "tests/ddp/test_shared_memory.py::test_exchanges_are_those_of_torch[3-dtype0-copied]",
    ),
    Fault(
        "a-statement-freed-while-others-read",
        "csrc/shm/memory.cpp",
        "memory.leave(mine_[i]);",
        "",
        "tests/conformance/test_unaveraged_gradients.py::test_the_error_of_a_slow_rank_is_the_same",
    ),
    # --- csrc/fsdp
    Fault(
        "gradients-that-no-rank-has-are-zeros",
        "csrc/fsdp/group_reduce.cpp",
        "if (used[i] == 0.0) continue;",
        "",
        "tests/fsdp/test_fsdp.py::test_parameters_that_some_ranks_do_not_use",
    ),
    Fault(
        "large-shares-filled-from-one-place",
        "csrc/fsdp/param_group.cpp",
        "      if (place.direct) next += share.numel;\n    }\n    items.unpack(borrowed_",
        "    }\n    items.unpack(borrowed_",
        "tests/fsdp/test_fsdp_shared_memory.py::test_weights_are_those_through_the_group[large-2]",
    ),
    # --- csrc/fault
    Fault(
        "heartbeat-never-sent",
        "csrc/comm/peers.cpp",
        "    if (link.rank >= 0 && link.out.empty() && due) {",
        "    if (false && link.rank >= 0 && link.out.empty() && due) {",
        "tests/faults/test_slow_ranks.py::test_every_rank_names_the_one_that_is_slow[2-forward]",
    ),
    Fault(
        "wrong-rank-named-in-a-fault",
        "csrc/fault/fault_events.cpp",
        'const std::string rank = concat("rank ", event.about);',
        'const std::string rank = concat("rank ", event.about + 1);',
        "tests/faults/test_faults.py"
        "::test_every_other_rank_says_what_has_happened_where[kill-backward-fp32-3]",
    ),
    Fault(
        "missing-unscale-of-large-gradients",
        "csrc/fsdp/group_reduce.cpp",
        "items.unpack(ops::run_of(gradient, 0, gradient.numel()), scale, accumulate);",
        "items.unpack(ops::run_of(gradient, 0, gradient.numel()), 1.0, accumulate);",
        "tests/fsdp/test_fsdp_shared_memory.py"
        "::test_gradients_of_large_shares_are_those_of_ddp[memory]",
    ),
]
