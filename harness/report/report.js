"use strict";
// Without this script everything can be read and reached; it sorts and filters tables, moves between cells by arrow keys,
// and shows what a mark of a picture says.
(() => {
  const UNITS = { B: 1, KiB: 1024, MiB: 1048576, GiB: 1073741824, TiB: 1099511627776 };
  const value = (cell) => {
    const text = cell ? cell.textContent.trim().replace("\u2212", "-") : "";
    const found = /^([+-]?[0-9.]+(?:e[+-]?[0-9]+)?)(?:\s*(B|KiB|MiB|GiB|TiB)\b)?/.exec(text);
    return { text, number: found ? Number(found[1]) * (UNITS[found[2]] || 1) : NaN };
  };
  const order = (a, b) => {
    if (!a.text !== !b.text) return a.text ? -1 : 1;
    const numbers = !Number.isNaN(a.number) && !Number.isNaN(b.number);
    return numbers ? a.number - b.number : a.text.localeCompare(b.text);
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, at) => {
      if (!head.textContent) return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const rows = [...table.tBodies[0].rows].map((row) => [value(row.cells[at]), row]);
        // Nulls stay last in both directions.
        rows.sort(([a], [b]) => (up || !a.text || !b.text ? order(a, b) : order(b, a)));
        table.tBodies[0].append(...rows.map(([, row]) => row));
      });
    });
  }
  const all = document.getElementById("all");
  if (all) {
    const label = document.createElement("label");
    label.className = "filter";
    const input = document.createElement("input");
    input.type = "search";
    label.append("Show only lines with ", input);
    all.parentElement.before(label);
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      for (const row of all.tBodies[0].rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
      }
    });
  }
  const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  document.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    const cell = step && event.target.closest && event.target.closest(".heat td");
    if (!cell) return;
    const rows = cell.closest("table").rows;
    let row = cell.parentElement.rowIndex;
    let column = cell.cellIndex;
    for (;;) {
      row += step[0];
      column += step[1];
      const next = rows[row] && rows[row].cells[column];
      if (!next) return;
      const link = next.querySelector("a");
      if (link) {
        event.preventDefault();
        link.focus();
        return;
      }
    }
  });
  const readout = document.createElement("div");
  readout.id = "readout";
  document.body.append(readout);
  const show = (event) => {
    const mark = event.target.closest && event.target.closest("svg a");
    const title = mark && mark.querySelector("title");
    readout.textContent = title ? title.textContent : "";
  };
  document.addEventListener("focusin", show);
  document.addEventListener("focusout", () => (readout.textContent = ""));
  document.addEventListener("mouseover", show);
})();
