// Live parts, relative times, light or dark, the menu, keys, and a question before an action that cannot be undone.
"use strict";
(() => {
  const root = document.body.dataset.root;

  // Times: the exact time in the title, the relative time in the text, kept up to date.
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const ago = (then) => {
    const seconds = (Date.now() - then) / 1000;
    const size = Math.abs(seconds);
    if (size < 2) return "now";
    const [unit, name] = units.find(([unit]) => size >= unit) ?? [1, "s"];
    const text = `${Math.floor(size / unit)} ${name}`;
    return seconds > 0 ? `${text} ago` : `in ${text}`;
  };
  const times = (within = document) => {
    for (const time of within.querySelectorAll("time[datetime]")) {
      const text = ago(Date.parse(time.dateTime));
      if (time.textContent !== text) time.textContent = text;
    }
  };
  times();
  setInterval(times, 1000);

  // Buttons for the chosen jobs are disabled while none is chosen.
  const chosen = () => {
    for (const button of document.querySelectorAll("[data-chosen]")) button.disabled = !button.form.querySelector("input[name=job]:checked");
  };
  chosen();

  // Live parts: one stream per page. The server renders the fragments for all viewers, so they are inserted unchanged.
  const parts = [...document.querySelectorAll("[data-live]")];
  const node = document.body.dataset.node;
  const point = node ? `point:${node}` : "point";
  const topics = new Set(parts.map((part) => part.dataset.live));
  if ("counts" in document.body.dataset) topics.add(point);
  const stale = document.querySelector("[data-stale]");
  if (topics.size) {
    const query = new URLSearchParams([...topics].map((topic) => ["topic", topic]));
    let stream, heard = 0;
    const open = () => {
      stream = new EventSource(`${root}/events?${query}`);
      // A stream ends from time to time and reconnects at once; if it does not, the page shows that.
      stream.onerror = () => {
        const ended = Date.now();
        setTimeout(() => { if (stream.readyState !== EventSource.OPEN && heard < ended) stale.hidden = false; }, 4000);
      };
      stream.addEventListener("live", (event) => { heard = Date.now(); stale.hidden = event.data === "ok"; });
      for (const part of parts) stream.addEventListener(part.dataset.live, (event) => put(part, event.data));
      stream.addEventListener(point, (event) => document.dispatchEvent(new CustomEvent("point", { detail: JSON.parse(event.data) })));
    };
    // A list is frozen while jobs are chosen in it, or by its button, which shows the number of newer jobs.
    const hold = document.querySelector("[data-hold]");
    const list = document.querySelector("[data-list]");
    let held = false, newest = null;
    const newer = (text) => {
      const fresh = [...new DOMParser().parseFromString(text, "text/html").querySelectorAll("tbody tr")];
      const known = fresh.findIndex((row) => document.getElementById(row.id));
      return known < 0 ? `${fresh.length}+` : known;
    };
    const put = async (part, text) => {
      if (part === list) {
        newest = text;
        if (held || part.querySelector("input:checked")) {
          hold.textContent = `Frozen: ${newer(text)} newer`;
          return;
        }
        hold.textContent = "Live";
      } else if (part.contains(document.activeElement) && document.activeElement.matches("input, select, textarea")) return;
      await htmx.swap({ sourceElement: part, target: part, text, swap: "innerMorph" });
      times(part);
      label(part);
      chosen();
    };
    if (hold) hold.hidden = false;
    hold?.addEventListener("click", () => {
      held = hold.textContent === "Live";
      hold.textContent = held ? "Frozen" : "Live";
      if (held) return;
      for (const box of list.querySelectorAll("input:checked")) box.checked = false;
      if (newest) put(list, newest);
    });
    // A hidden page requests nothing.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) stream?.close();
      else open();
    });
    window.addEventListener("pagehide", () => stream?.close());
    if (!document.hidden) open();
  }

  // The side bar: current numbers of open jobs, dead letters and so on.
  document.addEventListener("point", ({ detail }) => {
    for (const count of document.querySelectorAll("[data-count]")) count.textContent = detail[count.dataset.count].toLocaleString("en");
  });

  // On a phone, rows are cards, and each value has a label.
  const label = (within = document) => {
    for (const table of within.querySelectorAll("table")) {
      const heads = [...table.querySelectorAll("thead th")].map((head) => head.innerText.trim());
      for (const row of table.querySelectorAll("tbody tr")) [...row.children].forEach((cell, at) => { cell.dataset.label = heads[at] ?? ""; });
    }
  };
  label();

  // Keys: / filters, j and k move from row to row, ? shows the keys.
  const keys = document.getElementById("keys");
  const step = (by) => {
    const links = [...document.querySelectorAll("main tbody tr")].map((row) => row.querySelector("a[href]")).filter((link) => link?.checkVisibility());
    const row = document.activeElement.closest("tbody tr");
    const at = links.findIndex((link) => row?.contains(link));
    links[at < 0 ? 0 : Math.min(Math.max(at + by, 0), links.length - 1)]?.focus();
  };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey || keys.open || event.target.matches("input:not([type=checkbox]), select, textarea")) return;
    if (event.key === "j") step(1);
    else if (event.key === "k") step(-1);
    else if (event.key === "?") keys.showModal();
    else if (event.key === "/") {
      const menu = document.querySelector(".menu[aria-controls=filters]");
      if (menu) menu.setAttribute("aria-expanded", "true");
      document.querySelector("[role=search] input:not([type=hidden])")?.focus();
    } else return;
    event.preventDefault();
  });

  document.addEventListener("click", (event) => {
    if (event.target.closest("[data-keys]")) keys.showModal();
    const menu = event.target.closest("[data-menu]");
    if (menu) menu.setAttribute("aria-expanded", String(menu.getAttribute("aria-expanded") !== "true"));
    if (event.target.closest("[data-theme-switch]")) {
      const html = document.documentElement;
      const dark = html.dataset.theme ? html.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      html.dataset.theme = dark ? "light" : "dark";
      try { localStorage.setItem("tallybook-theme", html.dataset.theme); } catch { /* not stored */ }
      document.dispatchEvent(new Event("theme"));
    }
    const all = event.target.closest("[data-check-all]");
    if (all) for (const box of all.closest("form").querySelectorAll(`input[name="${all.dataset.checkAll}"]`)) box.checked = all.checked;
    chosen();
  });
  document.addEventListener("submit", (event) => {
    const question = event.submitter?.dataset.ask ?? event.target.dataset.ask;
    if (question && !confirm(question)) event.preventDefault();
  });
  // A changed filter is submitted at once.
  document.addEventListener("change", (event) => {
    if (event.target.matches("form[data-filter] select, form[data-filter] input[type=checkbox]")) event.target.form.requestSubmit();
  });
})();
