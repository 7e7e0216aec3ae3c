// The charts: what has been from the server once, then a point a second from the stream that feeds the page.
"use strict";
(() => {
  const root = document.body.dataset.root;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const kinds = {
    flow: [["completed", "--good"], ["failed", "--bad"]],
    level: [["open", "--accent"], ["waiting", "--warn"], ["scheduled", "--calm"]],
  };
  const short = (value) => value === null || value === undefined ? "–"
    : Math.abs(value) >= 1e6 ? `${+(value / 1e6).toPrecision(3)} M` : Math.abs(value) >= 1e4 ? `${+(value / 1e3).toPrecision(3)} k` : `${+value.toPrecision(3)}`;
  const two = (value) => String(value).padStart(2, "0");
  const clock = (seconds) => {
    const at = new Date(seconds * 1000);
    const time = `${two(at.getHours())}:${two(at.getMinutes())}`;
    return time === "00:00" ? `${at.getDate()}/${at.getMonth() + 1}` : time;
  };
  const charts = [];

  const draw = (one) => {
    one.plot?.destroy();
    const grid = { stroke: css("--line"), width: 1 };
    const axis = { stroke: css("--muted"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    one.plot = new uPlot({
      width: one.element.clientWidth, height: 190, cursor: { points: { size: 6 } }, legend: { live: true },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
      axes: [{ ...axis, values: (_, found) => found.map(clock) }, { ...axis, size: 56, values: (_, found) => found.map(short) }],
      series: [{ label: "at", value: (_, at) => (at ? new Date(at * 1000).toLocaleTimeString() : "–") }, ...kinds[one.kind].map(([label, color]) => (
        { label, stroke: css(color), width: 2, fill: `color-mix(in srgb, ${css(color)} 12%, transparent)`, points: { show: false }, value: (_, value) => short(value) }))],
    }, one.data, one.element);
  };

  const load = async (one) => {
    const query = new URLSearchParams({ span: one.element.dataset.span ?? "15m" });
    if (document.body.dataset.node) query.set("node", document.body.dataset.node);
    if (one.element.dataset.queue) query.set("queue", one.element.dataset.queue);
    const answer = await fetch(`${root}/series?${query}`).catch(() => null);
    if (!answer?.ok) return; // what was drawn stays; that nothing comes is told by the stream
    const found = await answer.json();
    one.data = [found.at, ...kinds[one.kind].map(([name]) => found[name])];
    one.from = found.at[0];
    if (found.at.length) draw(one);
  };

  for (const element of document.querySelectorAll("[data-chart]")) {
    const one = { element, kind: element.dataset.chart, data: null, plot: null };
    charts.push(one);
    load(one);
    new ResizeObserver(() => {
      if (one.plot && element.clientWidth && one.plot.width !== element.clientWidth) one.plot.setSize({ width: element.clientWidth, height: 190 });
    }).observe(element);
  }
  document.addEventListener("theme", () => charts.forEach((one) => one.data && draw(one)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((one) => one.data && draw(one)));

  // Short spans move with the seconds; long ones are read anew now and then.
  let last = null;
  document.addEventListener("point", ({ detail: now }) => {
    const seconds = last ? now.at - last.at : 0;
    for (const one of charts) {
      if (!one.data || one.element.dataset.queue || (one.element.dataset.span ?? "15m") !== "15m" || seconds <= 0) continue;
      const values = one.kind === "flow"
        ? [Math.max(0, now.completed - last.completed) / seconds, Math.max(0, now.failed - last.failed) / seconds]
        : [now.available + now.running, now.waiting, now.scheduled + now.retrying];
      one.data[0].push(now.at);
      values.forEach((value, index) => one.data[index + 1].push(value));
      while (one.data[0].length > 2 && one.data[0][0] < now.at - 900) one.data.forEach((column) => column.shift());
      if (one.plot) one.plot.setData(one.data); else draw(one);
    }
    last = now;
  });
  setInterval(() => charts.forEach((one) => { if (!document.hidden && (one.element.dataset.queue || (one.element.dataset.span ?? "15m") !== "15m")) load(one); }), 15000);
})();
