(() => {
  const plan = data;
  const color = (index) => `var(--c${index % 8})`;
  const curveColor = (index) => color([0, 1, 2, 3, 5, 6, 7][index % 7]); // c4 is too pale for a line
  const percent = (share) => `${(100 * share).toFixed(1)} %`;

  function bytes(count) {
    for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      if (count >= factor) return `${Number((count / factor).toPrecision(3))} ${unit}`;
    }
    return `${Math.round(count)} B`;
  }

  function duration(seconds) {
    for (const [unit, factor] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]]) {
      if (seconds >= factor) return `${Number((seconds / factor).toPrecision(3))} ${unit}`;
    }
    return seconds > 0 ? `${(seconds * 1e9).toFixed(0)} ns` : "0";
  }

  function legend(id, names, colorOf = color) {
    $(id).replaceChildren();
    names.forEach((name, index) => {
      const item = el($(id), "span");
      el(item, "i", { style: `background: ${colorOf(index)}` });
      item.append(name);
    });
  }

  function hover(node, text) {
    const tip = $("tip");
    node.addEventListener("pointermove", (event) => {
      tip.textContent = text;
      tip.hidden = false;
      const left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8);
      tip.style.left = `${left}px`;
      tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
    });
    node.addEventListener("pointerleave", () => { tip.hidden = true; });
  }

  function size(svg, height) {
    svg.replaceChildren();
    const width = svg.clientWidth || 800;
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.style.height = `${height}px`;
    return width;
  }

  // ---- head ----------------------------------------------------------------------------------------------------

  function drawHead() {
    $("title").textContent = plan.title;
    $("facts").textContent = [plan.where, plan.device.name, plan.compute.source].join("  ·  ");
    for (const reason of plan.advice.reasons || []) el($("advice"), "p", {}, reason);
  }

  // ---- memory --------------------------------------------------------------------------------------------------

  function drawMemory() {
    const rows = plan.candidates;
    $("memory-card").hidden = !rows.length;
    if (!rows.length) return;
    const items = Object.keys(rows[0].memory).filter((name) => rows.some((row) => row.memory[name] > 0));
    legend("memory-legend", items);
    const svg = $("memory");
    const line = 26;
    const width = size(svg, rows.length * line + 22);
    const left = 190;
    const limit = plan.device.memory;
    const most = Math.max(limit, ...rows.map((row) => row.peak));
    // Where one strategy needs many times the memory there is, the others would be slivers.
    const shown = Math.min(most, 4 * limit) * 1.02;
    const x = (value) => left + Math.min(value, shown) * (width - left - 90) / shown;
    rows.forEach((row, index) => {
      const y = index * line;
      const group = el(svg, "g", { class: "row", "data-strategy": row.name });
      el(group, "rect", { class: "hit", x: 0, y, width, height: line });
      el(group, "text", { class: "strong", x: left - 10, y: y + 17, "text-anchor": "end" }, row.name);
      let at = 0;
      items.forEach((name, number) => {
        const value = row.memory[name];
        const from = x(at);
        at += value;
        const to = x(at);
        if (to > from) el(group, "rect", { x: from, y: y + 4, width: to - from, height: line - 8, fill: color(number) });
      });
      const label = `${bytes(row.peak)}${row.peak > shown ? " →" : ""}`;
      el(group, "text", { class: row.fits ? "" : "over", x: x(row.peak) + 6, y: y + 17 }, label);
      const parts = items.filter((name) => row.memory[name] > 0).map((name) => `${bytes(row.memory[name])}  ${name}`);
      hover(group, [`${row.name}, ${row.phase}`, ...parts].join("\n"));
    });
    const bottom = rows.length * line;
    el(svg, "line", { class: "limit", x1: x(limit), x2: x(limit), y1: 0, y2: bottom + 4 });
    el(svg, "text", { class: "over", x: x(limit), y: bottom + 17, "text-anchor": "middle" }, `${bytes(limit)} of memory`);
  }

  // ---- curves --------------------------------------------------------------------------------------------------

  function ticks(values, log) {
    if (log) return values;
    const most = Math.max(...values);
    const step = 10 ** Math.floor(Math.log10(most || 1));
    const fitting = [step / 5, step / 2, step, 2 * step].find((s) => most / s <= 6) || step;
    return Array.from({ length: Math.floor(most / fitting + 1e-9) + 1 }, (_, i) => i * fitting);
  }

  function drawCurves(id, points, axis, value, shown, label) {
    const names = [...new Set(points.map((point) => point.strategy))];
    legend(`${id}-legend`, names, curveColor);
    const svg = $(id);
    const height = 280;
    const width = size(svg, height);
    const [left, right, top, bottom] = [64, 16, 10, 26];
    const places = [...new Set(points.map((point) => point[axis]))].sort((a, b) => a - b);
    const [low, high] = [Math.log(places[0]), Math.log(places[places.length - 1])];
    const x = (at) => left + (high > low ? (Math.log(at) - low) / (high - low) : 0.5) * (width - left - right);
    const most = Math.max(...points.map(value), 1e-12);
    const y = (v) => height - bottom - v * (height - top - bottom) / (most * 1.02);
    for (const tick of ticks(points.map(value), false)) {
      el(svg, "line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) });
      el(svg, "text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, shown(tick));
    }
    let last = -Infinity;
    for (const place of places) {
      if (x(place) - last < 44) continue;
      last = x(place);
      el(svg, "text", { x: last, y: height - 8, "text-anchor": "middle" }, label(place));
    }
    names.forEach((name, index) => {
      const own = points.filter((point) => point.strategy === name);
      const path = own.map((point, i) => `${i ? "L" : "M"}${x(point[axis])},${y(value(point))}`).join("");
      el(svg, "path", { class: "curve", d: path, stroke: curveColor(index) });
      for (const point of own) {
        const dot = el(svg, "circle", { cx: x(point[axis]), cy: y(value(point)), r: 3.5, fill: curveColor(index) });
        hover(dot, `${name}, ${label(point[axis])}\n${duration(point.mean)} a step, `
          + `${duration(point.exposed)} exposed\n${percent(point.efficiency)} efficiency`);
      }
    });
  }

  // ---- table ---------------------------------------------------------------------------------------------------

  function drawTable() {
    $("table-card").hidden = !plan.candidates.length;
    const unit = plan.tokens_per_sample ? "tokens/s" : "samples/s";
    const heads = ["strategy", "memory", "largest batch", "step", "late steps", "exposed", "efficiency", unit, "sent"];
    const head = el(el($("table"), "thead"), "tr");
    for (const name of heads) el(head, "th", { scope: "col" }, name);
    const body = el($("table"), "tbody");
    for (const row of plan.candidates) {
      const kind = row.name === plan.advice.best ? "best" : row.fits ? "" : "over";
      const line = el(body, "tr", { class: kind });
      const each = row.samples_per_second * (plan.tokens_per_sample || 1);
      el(line, "td", {}, row.name);
      el(line, "td", { class: row.fits ? "" : "over" }, bytes(row.peak));
      const cells = [row.largest_batch || "-", duration(row.time.mean), duration(row.time.late), duration(row.time.exposed),
        percent(row.time.efficiency), Math.round(each).toLocaleString("en"), bytes(row.time.sent)];
      for (const cell of cells) el(line, "td", {}, cell);
    }
  }

  function draw() {
    drawMemory();
    drawCurves("scaling", plan.scaling, "gpus", (p) => p.efficiency, (v) => `${Math.round(100 * v)} %`, (n) => `${n}`);
    drawCurves("bandwidth", plan.bandwidth, "rate", (p) => p.exposed, duration, (s) => `${s}×`);
  }

  drawHead();
  drawTable();
  draw();
  addEventListener("resize", draw);
})();
