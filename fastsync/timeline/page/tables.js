// How times and amounts read, and the table below the lanes.

function duration(ns) {
  const us = Math.abs(ns) / 1e3;
  if (us < 1000) return `${(ns / 1e3).toFixed(us < 10 ? 1 : 0)} µs`;
  const ms = us / 1e3;
  if (ms < 1000) return `${(ns / 1e6).toFixed(ms < 10 ? 2 : ms < 100 ? 1 : 0)} ms`;
  return `${(ns / 1e9).toFixed(2)} s`;
}

function bytes(count) {
  if (count < 1 << 10) return `${count} B`;
  if (count < 1 << 20) return `${(count / (1 << 10)).toFixed(1)} KiB`;
  return `${(count / (1 << 20)).toFixed(1)} MiB`;
}

function percent(share) {
  return `${Math.round(100 * share)} %`;
}

function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

// The same on every rank: of a bucket, or of a unit's collective.
function keyOf(x) {
  return x.kind ? `${x.kind} ${x.unit} ${x.turn}` : x.bucket;
}

function wordsOf(kind) {
  return kind === "sum" ? "sum over replicas" : kind;
}

function namesIn(cell, names) {
  cell.setAttribute("title", names.join("\n"));
  cell.textContent = names.length > 2 ? `${names[0]} … ${names[names.length - 1]} (${names.length})` : names.join(", ");
}

// Of each collective: what the rank with most of it has.
function unitTable(table, run, step) {
  const head = el(table, "tr");
  for (const name of ["unit", "parameters", "collective", "sent", "started (last rank)", "under way", "exposed"]) {
    el(head, "th", {}, name);
  }
  const found = new Map();
  for (const r of step.ranks) {
    for (const m of r.moves) {
      if (!found.has(keyOf(m))) found.set(keyOf(m), []);
      found.get(keyOf(m)).push(m);
    }
  }
  for (const moves of found.values()) {
    const [first] = moves;
    const info = run.units[first.unit];
    const most = (of) => Math.max(...moves.map(of));
    const exposed = most((m) => m.arrived - m.wanted);
    const row = el(table, "tr");
    el(row, "td", {}, info.name);
    namesIn(el(row, "td"), info.parameters);
    el(row, "td", {}, wordsOf(first.kind));
    el(row, "td", {}, bytes(most((m) => m.bytes)));
    el(row, "td", {}, duration(most((m) => m.started)));
    el(row, "td", {}, duration(most((m) => m.done - m.started)));
    el(row, "td", exposed > 0.01 * step.length ? { class: "late" } : {}, duration(exposed));
  }
}

function bucketTable(table, infos, step) {
  const head = el(table, "tr");
  for (const name of ["bucket", "parameters", "size", "ready (last rank)", "last to launch", "after the others", "done"]) {
    el(head, "th", {}, name);
  }
  infos.forEach((info, index) => {
    const found = step.ranks.flatMap((r) => r.buckets.filter((b) => b.bucket === index).map((b) => ({ r, b })));
    if (!found.length) return;
    const byLaunch = found.map((f) => f.b.launched).sort((a, b) => a - b);
    const last = found.find((f) => f.b.launched === byLaunch[byLaunch.length - 1]);
    const others = byLaunch.slice(0, -1);
    const lag = others.length ? byLaunch[byLaunch.length - 1] - medianOf(others) : 0;
    const row = el(table, "tr");
    el(row, "td", {}, index);
    namesIn(el(row, "td"), info.parameters);
    el(row, "td", {}, bytes(info.bytes));
    el(row, "td", {}, duration(Math.max(...found.map((f) => f.b.ready))));
    el(row, "td", {}, others.length ? `rank ${last.r.rank}` : "-");
    el(row, "td", lag > 0.01 * step.length ? { class: "late" } : {}, others.length ? duration(lag) : "-");
    el(row, "td", {}, duration(Math.max(...found.map((f) => f.b.done))));
  });
}

function medianOf(sorted) {
  const half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
