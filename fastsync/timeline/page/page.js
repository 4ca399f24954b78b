(() => {
  const run = data;
  const MS = 1e6; // nanoseconds
  const SHOWN_RANKS = 8;
  const GUTTER = 112;
  const RIGHT = 12;

  // ---- what is shown -------------------------------------------------------------------------------------------

  let chosen = run.summary.typical; // index of a step
  let view = null; // [start, end] in nanoseconds of the step
  let ranks = chooseRanks(SHOWN_RANKS);

  function chooseRanks(count) {
    const all = run.ranks.slice();
    if (all.length <= count) return all;
    const first = all.slice(0, count);
    const straggler = run.summary.straggler;
    if (straggler && !first.includes(straggler.rank)) first[count - 1] = straggler.rank;
    return first;
  }

  const step = () => run.steps[chosen];
  const infos = () => run.plans[step().plan - 1] || [];
  const byUnits = run.units.length > 0;
  const shownRanks = () => step().ranks.filter((r) => ranks.includes(r.rank));

  const launchOf = (x) => (x.kind ? x.started : x.launched);

  // When the last rank launched each collective: before that moment, the others can only wait.
  function lastLaunches() {
    const last = new Map();
    for (const r of step().ranks) {
      for (const x of [...r.buckets, ...r.moves]) {
        const known = last.get(keyOf(x));
        if (!known || launchOf(x) > known.time) last.set(keyOf(x), { time: launchOf(x), rank: r.rank });
      }
    }
    return last;
  }

  // A rank's lanes: its buckets, or its units in the order in which it needs them.
  function lanesOf(r) {
    if (!byUnits) return r.buckets.map((b) => ({ name: `bucket ${b.bucket}`, bucket: b, moves: [] }));
    const lanes = new Map();
    for (const m of r.moves) {
      if (!lanes.has(m.unit)) lanes.set(m.unit, { name: run.units[m.unit].name, bucket: null, moves: [] });
      lanes.get(m.unit).moves.push(m);
    }
    return [...lanes.values()];
  }

  // ---- head ----------------------------------------------------------------------------------------------------

  function drawHead() {
    const s = run.summary;
    $("title").textContent = `Gradient synchronisation of ${run.model} on ${plural(run.world_size, "rank")}`;
    const numbers = run.steps.map((x) => x.number);
    const clocks = s.clock_error > 0 ? `clocks aligned within ±${duration(s.clock_error)}` : "one clock";
    const facts = [
      numbers.length > 1 ? `steps ${numbers[0]} to ${numbers[numbers.length - 1]}` : `step ${numbers[0]}`,
      `${run.backend} on ${run.device}`, `torch ${run.torch}`, clocks,
    ];
    if (run.missing.length) facts.push(`nothing recorded of rank ${run.missing.join(", ")}`);
    facts.push(...run.lost);
    $("facts").textContent = facts.join("  ·  ");
    const verdict = $("verdict");
    verdict.append("Of a step of ");
    el(verdict, "b", {}, duration(s.step));
    verdict.append(", ");
    el(verdict, "b", {}, `${duration(s.exposed)} (${percent(s.exposed / s.step)})`);
    verdict.append(byUnits
      ? ` is exposed: the computation stands still, for ${duration(s.gather_exposed)} of it until parameters are there, `
        + "and else until gradients are. "
      : " is exposed: computing is over and gradients are still under way. ");
    const straggler = s.straggler;
    if (straggler) {
      el(verdict, "b", { id: "straggler" }, `Rank ${straggler.rank} is the straggler`);
      verdict.append(`: it launches last in ${straggler.late_steps} of ${straggler.steps} steps, `
        + `${duration(straggler.lag)} after the others. It is slow ${straggler.slow}.`);
    } else if (run.world_size > 1) {
      el(verdict, "span", { id: "straggler" }, "No rank keeps the others waiting.");
    }
    tile("Step", duration(s.step), `median of ${plural(run.steps.length, "step")}`);
    tile("Exposed", duration(s.exposed), `${percent(s.exposed / s.step)} of the step`, "exposed");
    tile("Overlap", percent(s.overlap),
      `of ${duration(s.communicating)} of communication ${byUnits ? "is not exposed" : "lies within backward"}`);
    const moves = Object.entries(s.moves).filter(([, count]) => count > 0);
    tile("Communication ratio", s.computing ? (s.communicating / s.computing).toFixed(2) : "-",
      `of computation; ${bytes(s.bytes)} a step in `
      + (byUnits ? moves.map(([kind, count]) => plural(count, kind)).join(", ") : plural(s.buckets, "bucket")));
    tile("Straggler", straggler ? `rank ${straggler.rank}` : "none",
      straggler ? `${duration(straggler.lag)} after the others, slow ${straggler.slow}` : "nobody is late in most of the steps");
  }

  function tile(name, value, note, kind = "") {
    const box = el($("tiles"), "div", { class: `tile ${kind}` });
    el(box, "div", { class: "name" }, name);
    el(box, "div", { class: "value" }, value);
    el(box, "div", { class: "note" }, note);
  }

  function drawLegend() {
    const entries = [["forward", "forward"], ["backward", "backward"],
      ...(byUnits ? [] : [["queue", "waits for its turn, is packed"]]),
      ["peer", "launched, waits for a later rank"],
      ...(byUnits ? [["wire", "gather under way"], ["gradients", "reduction under way"]] : [["wire", "collective under way"]]),
      ["shade", "exposed"]];
    for (const [kind, label] of entries) {
      const item = el($("legend"), "span");
      el(el(item, "svg", { viewBox: "0 0 16 11" }), "rect", { class: kind, width: 16, height: 11, rx: 2 });
      item.append(label);
    }
  }

  // ---- the strip of steps --------------------------------------------------------------------------------------

  function drawSteps() {
    const svg = $("steps");
    svg.replaceChildren();
    const width = svg.clientWidth || 1000;
    const height = 64;
    svg.setAttribute("viewBox", `0 0 ${width} ${height + 16}`);
    svg.style.height = `${height + 16}px`;
    const longest = Math.max(...run.steps.map((s) => s.length));
    const pitch = Math.min(64, width / run.steps.length);
    const every = Math.ceil(30 / pitch);
    run.steps.forEach((s, i) => {
      const group = el(svg, "g", { class: "step", role: "option", "aria-selected": i === chosen, "data-step": s.number });
      const full = (height * s.length) / longest;
      const red = (height * s.exposed) / longest;
      const x = i * pitch + pitch * 0.15;
      const w = pitch * 0.7;
      el(group, "rect", { class: "compute-bar", x, y: height - full, width: w, height: full, rx: 1.5 });
      el(group, "rect", { class: "exposed-bar", x, y: height - full, width: w, height: red, rx: 1.5 });
      el(group, "rect", { class: "hit", x: i * pitch, y: 0, width: pitch, height: height + 16 });
      if (i === chosen) {
        el(group, "rect", { class: "chosen", x: x - 2, y: height - full - 2 + 2, width: w + 4, height: full, rx: 3 });
      }
      if (i % every === 0 || i === chosen) {
        el(group, "text", { x: x + w / 2, y: height + 13, "text-anchor": "middle" }, s.number);
      }
      el(group, "title", {}, `step ${s.number}: ${duration(s.length)}, of which ${duration(s.exposed)} exposed`);
      group.addEventListener("click", () => choose(i));
    });
  }

  function choose(index) {
    chosen = Math.max(0, Math.min(run.steps.length - 1, index));
    view = null;
    drawSteps();
    drawChart();
    drawTable();
  }

  // ---- the chart -----------------------------------------------------------------------------------------------

  let scale = null; // what the last drawing used

  function layout() {
    const count = Math.max(1, ...step().ranks.map((r) => lanesOf(r).length));
    const shown = shownRanks().length;
    const lane = Math.max(4, Math.min(18, Math.floor(560 / (shown * count))));
    const gap = lane > 8 ? 3 : 1;
    const big = 22;
    const head = 30;
    const rank = head + big + 5 + count * (lane + gap) + 5 + big + 16;
    return { count, lane, gap, big, head, rank, top: 24 };
  }

  function drawChart() {
    const svg = $("chart");
    svg.replaceChildren();
    const width = svg.clientWidth || 1000;
    const size = layout();
    const shown = shownRanks();
    const height = size.top + shown.length * size.rank;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.height = `${height}px`;
    if (!view) view = [0, step().length];
    const plot = width - GUTTER - RIGHT;
    const x = (time) => GUTTER + ((time - view[0]) / (view[1] - view[0])) * plot;
    scale = { x, plot, width, height };
    $("step-title").textContent = `Step ${step().number}`;
    const clip = el(el(svg, "defs"), "clipPath", { id: "plot" });
    el(clip, "rect", { x: GUTTER, y: 0, width: plot, height });
    drawAxis(svg, x, height);
    const last = lastLaunches();
    shown.forEach((r, i) => drawRank(svg, r, size.top + i * size.rank, size, last));
    el(svg, "line", { class: "cursor", id: "cursor", y1: size.top, y2: height, visibility: "hidden" });
    el(svg, "text", { id: "cursor-time", y: 12, visibility: "hidden", class: "strong", "text-anchor": "middle" });
  }

  function drawAxis(svg, x, height) {
    const span = view[1] - view[0];
    const rough = span / Math.max(3, scale.plot / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const pitch = [1, 2, 5, 10].map((m) => m * power).find((p) => p >= rough);
    for (let t = Math.ceil(view[0] / pitch) * pitch; t <= view[1]; t += pitch) {
      el(svg, "line", { class: "grid", x1: x(t), x2: x(t), y1: 18, y2: height - 8 });
      el(svg, "text", { x: x(t), y: 12, "text-anchor": "middle", class: "tick" }, t === 0 ? "0" : axisLabel(t, pitch));
    }
  }

  function axisLabel(time, pitch) {
    const digits = Math.max(0, -Math.floor(Math.log10(pitch / MS)));
    return `${(time / MS).toFixed(Math.min(4, digits))} ms`;
  }

  function box(parent, kind, start, end, y, h, more = {}) {
    const left = scale.x(start);
    const width = Math.max(scale.x(end) - left, end > start ? 0.75 : 0);
    return el(parent, "rect", { class: kind, x: left, y, width, height: h, rx: Math.min(2, h / 4), ...more });
  }

  function label(parent, words, start, end, y) {
    const left = Math.max(scale.x(start), GUTTER);
    const right = Math.min(scale.x(end), GUTTER + scale.plot);
    if (right - left < words.length * 6.5 + 8) return;
    el(parent, "text", { class: "inside", x: (left + right) / 2, y, "text-anchor": "middle" }, words);
  }

  function drawRank(svg, r, top, size, last) {
    const group = el(svg, "g", { class: "rank", "data-rank": r.rank });
    el(group, "text", { class: "strong", x: 0, y: top + 20 }, `rank ${r.rank}`);
    const lag = step().lag;
    const straggles = lag && lag.rank === r.rank && lag.ns > 0.01 * step().length;
    if (straggles) {
      el(group, "text", { class: "late", x: GUTTER, y: top + 20 }, `launches ${duration(lag.ns)} after the others`);
    }
    const inner = el(group, "g", { "clip-path": "url(#plot)" });
    const body = top + size.head;
    const lanes = body + size.big + 5;
    const foot = lanes + size.count * (size.lane + size.gap) + 5;
    lane(group, inner, "compute", body, size.big);
    const rows = lanesOf(r);
    const rowAt = (i) => lanes + i * (size.lane + size.gap);
    rows.forEach((row, i) => rowLane(group, inner, row.name, i, rowAt(i), size));
    lane(group, inner, "communication", foot, size.big);
    for (const [a, b] of r.exposures) box(inner, "shade exposed", a, b, top + 8, foot + size.big - top - 8, { rx: 0 });
    for (const [a, b] of r.forwards) {
      const bar = box(inner, "forward", a, b, body, size.big);
      el(bar, "title", {}, `forward: ${duration(b - a)}`);
    }
    for (const [a, b] of [...r.accumulating, r.backward]) {
      const bar = box(inner, "backward", a, b, body, size.big);
      el(bar, "title", {}, `backward: ${duration(b - a)}`);
    }
    label(inner, "backward", r.backward[0], r.backward[1], body + 15);
    if (byUnits) for (const [a, b] of r.exposures) box(inner, "stall", a, b, body, size.big, { rx: 0 });
    rows.forEach((row, i) => {
      if (row.bucket) drawBucket(inner, r, row.bucket, rowAt(i), size.lane, last.get(row.bucket.bucket));
      for (const m of row.moves) drawMove(inner, r, m, rowAt(i), size.lane, last.get(keyOf(m)));
    });
    for (const x of [...r.buckets, ...r.moves]) box(inner, "peer", launchOf(x), x.done, foot, size.big);
    for (const x of [...r.buckets, ...r.moves]) box(inner, kindOf(x), moving(x, last), x.done, foot, size.big);
    if (r.buckets.length || r.moves.length) nameExposed(inner, r, top + 8, foot + size.big);
  }

  const kindOf = (x) => (x.kind && x.kind !== "gather" ? "gradients" : "wire");
  const moving = (x, last) => Math.min(x.done, Math.max(launchOf(x), last.get(keyOf(x)).time));

  function lane(group, inner, name, y, h) {
    el(group, "text", { x: GUTTER - 8, y: y + h / 2 + 4, "text-anchor": "end" }, name);
    el(inner, "rect", { class: "lane", x: GUTTER, y, width: scale.plot, height: h, rx: 2 });
  }

  function rowLane(group, inner, name, i, y, size) {
    el(inner, "rect", { class: "lane", x: GUTTER, y, width: scale.plot, height: size.lane, rx: 2 });
    if (i % Math.ceil(12 / (size.lane + size.gap)) > 0) return; // no room for every name
    const shown = name.length > 17 ? `…${name.slice(-16)}` : name;
    el(group, "text", { x: GUTTER - 8, y: y + size.lane / 2 + 4, "text-anchor": "end" }, shown);
  }

  function nameExposed(inner, r, top, bottom) {
    const [start, end] = [r.backward[1], r.end];
    el(inner, "line", { class: "edge", x1: scale.x(start), x2: scale.x(start), y1: top, y2: bottom });
    const words = byUnits
      ? `exposed ${duration(r.exposures.reduce((sum, [a, b]) => sum + b - a, 0))} in all`
      : `exposed ${duration(end - start)}`;
    const room = scale.x(end) - scale.x(start) > words.length * 7;
    const at = room ? { x: scale.x(start) + 5 } : { x: scale.x(start) - 5, "text-anchor": "end" };
    el(inner, "text", { class: "on-exposed", y: top + 12, ...at }, words);
  }

  function drawBucket(inner, r, b, y, h, last) {
    const group = el(inner, "g", { class: "bucket", tabindex: 0, "data-bucket": b.bucket, "data-rank": r.rank });
    box(group, "queue", b.ready, b.packed, y, h);
    box(group, "peer", b.launched, b.done, y, h);
    box(group, "wire", Math.min(b.done, Math.max(b.launched, last.time)), b.done, y, h);
    const hit = box(group, "hit", b.ready, b.done, y - 1, h + 2);
    onHover(group, hit, aboutBucket(infos()[b.bucket] || { parameters: [], wire: "" }, r, b, last));
  }

  function drawMove(inner, r, m, y, h, last) {
    const group = el(inner, "g", {
      class: "bucket move", tabindex: 0, "data-bucket": `unit ${m.unit}`, "data-kind": m.kind, "data-rank": r.rank,
    });
    box(group, "peer", m.started, m.done, y, h);
    box(group, kindOf(m), Math.min(m.done, Math.max(m.started, last.time)), m.done, y, h);
    if (m.arrived > m.wanted) box(group, "stall", m.wanted, m.arrived, y + h * 0.35, h * 0.3, { rx: 0 });
    const hit = box(group, "hit", m.started, m.arrived, y - 1, h + 2);
    onHover(group, hit, aboutMove(run.units[m.unit], r, m, last));
  }

  function onHover(group, hit, about) {
    const show = (event) => showTip(about, event, hit);
    group.addEventListener("pointermove", show);
    group.addEventListener("focus", show);
    for (const kind of ["pointerleave", "blur"]) group.addEventListener(kind, hideTip);
  }

  function drawTable() {
    const table = $("buckets");
    table.replaceChildren();
    $("table-title").textContent = byUnits ? "Units of this step" : "Buckets of this step";
    if (byUnits) unitTable(table, run, step());
    else bucketTable(table, infos(), step());
  }

  // ---- zoom and pan --------------------------------------------------------------------------------------------

  function zoom(factor, share = 0.5) {
    const [start, end] = view;
    const span = Math.min(step().length, Math.max(1e3, (end - start) * factor));
    const centre = start + share * (end - start);
    moveTo(centre - share * span, span);
  }

  function moveTo(start, span) {
    const from = Math.max(0, Math.min(step().length - span, start));
    view = [from, from + span];
    drawChart();
  }

  const shareOf = (event) => {
    const x = event.clientX - $("chart").getBoundingClientRect().left;
    return Math.max(0, Math.min(1, (x - GUTTER) / scale.plot));
  };

  function listen() {
    const chart = $("chart");
    let drag = null;
    chart.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, shareOf(event));
    }, { passive: false });
    chart.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, start: view[0], span: view[1] - view[0] };
    });
    chart.addEventListener("pointermove", (event) => {
      if (drag && event.buttons) {
        chart.classList.add("dragging");
        moveTo(drag.start - ((event.clientX - drag.x) / scale.plot) * drag.span, drag.span);
      }
      moveCursor(event);
    });
    for (const kind of ["pointerup", "pointerleave"]) {
      chart.addEventListener(kind, () => { drag = null; chart.classList.remove("dragging"); });
    }
    chart.addEventListener("dblclick", () => moveTo(0, step().length));
    $("zoom-in").addEventListener("click", () => zoom(0.5));
    $("zoom-out").addEventListener("click", () => zoom(2));
    $("zoom-reset").addEventListener("click", () => moveTo(0, step().length));
    document.addEventListener("keydown", (event) => {
      if (event.target.tagName === "SELECT" || event.ctrlKey || event.metaKey || event.altKey) return;
      const keys = {
        ArrowLeft: () => choose(chosen - 1), ArrowRight: () => choose(chosen + 1),
        "+": () => zoom(0.5), "-": () => zoom(2), 0: () => moveTo(0, step().length), Escape: hideTip,
      };
      if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
    });
    window.addEventListener("resize", () => { drawSteps(); drawChart(); });
  }

  function moveCursor(event) {
    const time = view[0] + shareOf(event) * (view[1] - view[0]);
    const x = scale.x(time);
    const cursor = $("cursor");
    const words = $("cursor-time");
    for (const [key, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) cursor.setAttribute(key, value);
    words.setAttribute("x", x);
    words.setAttribute("visibility", "visible");
    words.textContent = duration(time);
    for (const tick of document.querySelectorAll("#chart .tick")) {
      tick.setAttribute("opacity", Math.abs(tick.getAttribute("x") - x) < 62 ? 0 : 1);
    }
  }

  function offerRanks() {
    if (run.ranks.length <= SHOWN_RANKS) return;
    $("rank-choice").hidden = false;
    el($("ranks"), "option", { value: SHOWN_RANKS }, `${SHOWN_RANKS} of ${run.ranks.length}`);
    el($("ranks"), "option", { value: run.ranks.length }, "all");
    $("ranks").addEventListener("change", (event) => { ranks = chooseRanks(Number(event.target.value)); drawChart(); });
  }

  drawHead();
  drawLegend();
  offerRanks();
  listen();
  choose(chosen);
})();
