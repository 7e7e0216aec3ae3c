// The charts: past points from the server once, then one point per second from the stream of the page.
"use strict";
(() => {
  const root = document.body.dataset.root;
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const kinds = {
    flow: [["completed", "--good"], ["failed", "--bad"]],
    level: [["open", "--run"], ["scheduled", "--calm"], ["retrying", "--warn"], ["waiting", "--muted"]],
  };
  const short = (value) => value === null || value === undefined ? "–"
    : Math.abs(value) >= 1e6 ? `${+(value / 1e6).toPrecision(3)} M` : Math.abs(value) >= 1e4 ? `${+(value / 1e3).toPrecision(3)} k`
    : `${Number.isInteger(value) ? value : +value.toPrecision(3)}`;
  // 24 hours and UTC, as on all pages.
  const utc = (seconds, from, to) => new Date(seconds * 1000).toISOString().slice(from, to);
  const clock = (seconds) => (utc(seconds, 11, 16) === "00:00" ? utc(seconds, 5, 10) : utc(seconds, 11, 16));
  const charts = [];

  const now = (plot) => plot.setLegend({ idx: plot.data[0].length - 1 }, false);

  const draw = (one) => {
    one.plot?.destroy();
    const grid = { stroke: css("--line"), width: 1 };
    const axis = { stroke: css("--muted"), grid, ticks: grid, font: "12px system-ui, sans-serif" };
    one.plot = new uPlot({
      width: one.element.clientWidth, height: 190, tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"),
      cursor: { points: { size: 6 } },
      // Without the pointer, the legend shows the current values.
      hooks: { setLegend: [(plot) => { if (plot.cursor.idx == null && plot.legend.idx == null) now(plot); }] },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
      axes: [{ ...axis, values: (_, found) => found.map(clock) }, { ...axis, size: 56, values: (_, found) => found.map(short) }],
      series: [{ label: "at", value: (_, at) => (at ? `${utc(at, 0, 16).replace("T", " ")} UTC` : "–") }, ...kinds[one.kind].map(([label, color]) => (
        { label, stroke: css(color), width: 2, fill: `color-mix(in srgb, ${css(color)} 12%, transparent)`, points: { show: false }, value: (_, value) => short(value) }))],
    }, one.data, one.element);
    now(one.plot);
  };

  const load = async (one) => {
    const query = new URLSearchParams({ span: one.element.dataset.span });
    if (document.body.dataset.node) query.set("node", document.body.dataset.node);
    if (one.element.dataset.queue) query.set("queue", one.element.dataset.queue);
    const answer = await fetch(`${root}/series?${query}`).catch(() => null);
    if (!answer?.ok) return; // the chart stays; the stream shows that there are no updates
    const found = await answer.json();
    one.data = [found.at, ...kinds[one.kind].map(([name]) => found[name])];
    if (found.at.length) draw(one);
  };

  for (const element of document.querySelectorAll("[data-chart]")) {
    const one = { element, kind: element.dataset.chart, data: null, plot: null };
    charts.push(one);
    load(one);
    new ResizeObserver(() => requestAnimationFrame(() => {
      if (one.plot && element.clientWidth && one.plot.width !== element.clientWidth) one.plot.setSize({ width: element.clientWidth, height: 190 });
    })).observe(element);
  }
  document.addEventListener("theme", () => charts.forEach((one) => one.data && draw(one)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach((one) => one.data && draw(one)));

  // Short spans move every second; long ones are read again every 15 s.
  const moves = (one) => !one.element.dataset.queue && one.element.dataset.span === "15m";
  document.addEventListener("point", ({ detail: point }) => {
    for (const one of charts) {
      if (!one.data || !moves(one) || point.at <= one.data[0].at(-1)) continue;
      one.data[0].push(point.at);
      kinds[one.kind].forEach(([name], index) => one.data[index + 1].push(point[name]));
      while (one.data[0].length > 2 && one.data[0][0] < point.at - 900) one.data.forEach((column) => column.shift());
      if (one.plot) { one.plot.setData(one.data); if (one.plot.cursor.idx == null) now(one.plot); } else draw(one);
    }
  });
  setInterval(() => charts.forEach((one) => { if (!document.hidden && !moves(one)) load(one); }), 15000);
  // Each chart has its own span: a click redraws it without a reload.
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-span]");
    const one = link && charts.find(({ element }) => link.closest("figure").contains(element));
    if (!one || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    link.parentElement.querySelector("[aria-current]").removeAttribute("aria-current");
    link.setAttribute("aria-current", "true");
    one.element.dataset.span = link.dataset.span;
    const address = new URL(location);
    address.searchParams.set(one.kind, link.dataset.span);
    history.replaceState(null, "", address);
    load(one);
  });
})();
