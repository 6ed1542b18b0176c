"use strict";
(() => {
  const root = document.documentElement;
  const one = (selector, from = document) => from.querySelector(selector);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];

  // Theme: as the system has it, light, dark.
  const themes = { auto: "◐ auto", light: "○ light", dark: "● dark" };
  const words = { auto: "as the system has it", light: "light", dark: "dark" };
  const button = one("#theme");
  const remember = (name) => { try { localStorage.setItem("draftproof-theme", name); } catch { /* a file may have no storage */ } };
  const remembered = () => { try { return localStorage.getItem("draftproof-theme"); } catch { return null; } };
  const paint = (name) => {
    root.dataset.theme = name in themes ? name : "auto";
    button.textContent = themes[root.dataset.theme];
    button.setAttribute("aria-label", `Colour theme: ${words[root.dataset.theme]}`);
  };
  button.addEventListener("click", () => {
    const names = Object.keys(themes);
    paint(names[(names.indexOf(root.dataset.theme) + 1) % names.length]);
    remember(root.dataset.theme);
  });
  paint(remembered() ?? "auto");

  // Details in a dialog. The browser closes it on Escape and gives the focus back.
  const dialog = one("#detail");
  const show = (id) => {
    const found = document.getElementById(id);
    const details = found?.closest("details.seen");
    if (!details) return false;
    one("#detail-title").replaceChildren(...one("summary", details).cloneNode(true).childNodes);
    const body = one(".body", details).cloneNode(true);
    all("[id]", body).forEach((inner) => inner.removeAttribute("id"));
    one("#detail-body").replaceChildren(body);
    dialog.showModal();
    dialog.scrollTop = 0;
    return true;
  };
  const copy = async (made) => {
    const text = one("pre", made.parentElement).textContent;
    try {
      await navigator.clipboard.writeText(text);
      made.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(one("pre", made.parentElement));
      made.textContent = "Selected";
    }
  };
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open]");
    if (opener && !event.ctrlKey && !event.metaKey && !event.shiftKey && show(opener.dataset.open)) event.preventDefault();
    const made = event.target.closest("button.copy");
    if (made) copy(made);
    if (event.target === dialog) dialog.close();
  });
  one("#close").addEventListener("click", () => dialog.close());

  // Arrow keys walk along the cells of a matrix that lead somewhere.
  const moves = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] };
  document.addEventListener("keydown", (event) => {
    const cell = event.target.closest?.("table.matrix td, table.matrix tbody th");
    const move = moves[event.key];
    if (!cell || !move || event.ctrlKey || event.metaKey || event.altKey) return;
    const rows = [...cell.closest("tbody").rows];
    let row = rows.indexOf(cell.parentElement), column = cell.cellIndex;
    for (;;) {
      row += move[0];
      column += move[1];
      const next = rows[row]?.cells[column];
      if (!next) return;
      const link = one("a", next);
      if (link && link.offsetParent) {
        event.preventDefault();
        link.focus();
        return;
      }
    }
  });

  // Filters.
  const form = one("#filters");
  const filter = () => {
    const drafter = form.elements.drafter.value, invariant = form.elements.invariant.value;
    const statuses = new Set(all("input[name=status]:checked", form).map((box) => box.value));
    const fits = (data) => (!drafter || !("drafter" in data) || data.drafter === drafter)
      && (!invariant || !("invariant" in data) || data.invariant === invariant)
      && (!("status" in data) || statuses.has(data.status));
    let shown = 0, total = 0;
    for (const table of all("#scorecards table.matrix")) {
      const head = [...table.tHead.rows[0].cells];
      head.forEach((cell) => { cell.hidden = !fits(cell.dataset); });
      for (const row of table.tBodies[0].rows) {
        let left = 0;
        [...row.cells].forEach((cell, place) => {
          if (place) cell.hidden = head[place].hidden;
          if (!("status" in cell.dataset)) return;
          const on = fits(cell.dataset);
          cell.classList.toggle("off", !on);
          total += 1;
          left += on;
        });
        row.hidden = !left;
        shown += left;
      }
    }
    for (const part of all("#scorecards details.seen, #differences tr[data-drafter]")) {
      const places = all("span[data-drafter]", part);
      places.forEach((place) => { place.hidden = !fits(place.dataset); });
      part.hidden = !fits(part.dataset) || (places.length > 0 && places.every((place) => place.hidden));
    }
    one("#shown").textContent = shown === total ? `${total} cells` : `${shown} of ${total} cells`;
  };
  if (form) {
    form.addEventListener("input", filter);
    form.addEventListener("reset", () => setTimeout(filter));
    form.addEventListener("submit", (event) => event.preventDefault());
    filter();
  }

  // Paper has no way to open anything.
  const paper = matchMedia("print");
  let opened = [];
  const unfold = () => {
    if (paper.matches) {
      opened = all("details:not([open])");
      opened.forEach((part) => { part.open = true; });
    } else {
      opened.forEach((part) => { part.open = false; });
      opened = [];
    }
  };
  paper.addEventListener("change", unfold);
  unfold();

  // A link to a place inside something folded unfolds it.
  const reveal = () => {
    for (let part = document.getElementById(location.hash.slice(1)); part; part = part.parentElement) {
      if (part.tagName === "DETAILS") part.open = true;
    }
  };
  addEventListener("hashchange", reveal);
  reveal();
})();
