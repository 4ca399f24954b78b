// What the pointer shows of a bucket, or of a unit's collective.

const NAMED_IN_TIP = 8; // parameters

function aboutBucket(info, r, b, last) {
  const waited = Math.max(0, Math.min(b.done, last.time) - b.launched);
  const rows = [["ready", duration(b.ready)], ["packed", `+${duration(b.packed - b.ready)}`],
    ["launched", `+${duration(b.launched - b.packed)}`], ["done", `+${duration(b.done - b.launched)}`]];
  if (last.rank !== r.rank && waited > 0) rows.push([`of that, waiting for rank ${last.rank}`, duration(waited)]);
  return {
    twins: String(b.bucket), title: `bucket ${b.bucket} on rank ${r.rank}`,
    note: `${plural(info.parameters.length, "parameter")}, ${bytes(b.bytes)} as ${info.wire}`,
    rows, names: info.parameters,
  };
}

function aboutMove(info, r, m, last) {
  const waited = Math.max(0, Math.min(m.done, last.time) - m.started);
  const rows = [["started", duration(m.started)], ["done", `+${duration(m.done - m.started)}`],
    ["wanted", `+${duration(m.wanted - m.started)}`], ["exposed", duration(m.arrived - m.wanted)]];
  if (last.rank !== r.rank && waited > 0) rows.push([`waiting for rank ${last.rank}`, duration(waited)]);
  return {
    twins: `unit ${m.unit}`, title: `${wordsOf(m.kind)} of ${info.name} on rank ${r.rank}`,
    note: `${plural(info.parameters.length, "parameter")}, ${bytes(info.bytes)} as ${info.dtype}; ${bytes(m.bytes)} sent`,
    rows, names: info.parameters,
  };
}

function showTip(about, event, anchor) {
  const tip = $("tip");
  tip.replaceChildren();
  el(tip, "h3", {}, about.title);
  el(tip, "p", {}, about.note);
  const table = el(tip, "table");
  for (const [name, value] of about.rows) {
    const row = el(table, "tr");
    el(row, "td", {}, name);
    el(row, "td", {}, value);
  }
  const list = el(tip, "ul");
  for (const name of about.names.slice(0, NAMED_IN_TIP)) el(list, "li", {}, name);
  if (about.names.length > NAMED_IN_TIP) el(list, "li", {}, `and ${about.names.length - NAMED_IN_TIP} more`);
  for (const twin of document.querySelectorAll(".bucket")) {
    twin.classList.toggle("twin", twin.dataset.bucket === about.twins);
  }
  tip.hidden = false;
  const place = anchor.getBoundingClientRect();
  const x = event.clientX ?? place.left + place.width / 2;
  const y = event.clientY ?? place.bottom;
  const fits = x + 20 + tip.offsetWidth < window.innerWidth;
  tip.style.left = `${Math.max(8, fits ? x + 16 : x - tip.offsetWidth - 16)}px`;
  tip.style.top = `${Math.max(8, Math.min(y + 14, window.innerHeight - tip.offsetHeight - 8))}px`;
}

function hideTip() {
  $("tip").hidden = true;
  for (const twin of document.querySelectorAll(".twin")) twin.classList.remove("twin");
}
