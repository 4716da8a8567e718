"use strict";
{
  const tip = document.getElementById("tip");
  let near = null;

  const hide = () => {
    near?.classList.remove("near");
    near = null;
    tip.hidden = true;
  };

  const show = (mark) => {
    if (mark !== near) {
      hide();
      near = mark;
      mark.classList.add("near");
      tip.textContent = mark.dataset.text;
      tip.style.setProperty("--own", getComputedStyle(mark).getPropertyValue("--own"));
      tip.hidden = false;
    }
    const at = mark.getBoundingClientRect();
    const left = at.right + 12 + tip.offsetWidth < innerWidth ? at.right + 12 : at.left - 12 - tip.offsetWidth;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(at.top - 8, innerHeight - tip.offsetHeight - 4))}px`;
  };

  const nearest = (marks, x, y) => {
    let best = null, least = 32 ** 2; // pixels, squared
    for (const mark of marks) {
      const at = mark.getBoundingClientRect();
      const distance = (at.x + at.width / 2 - x) ** 2 + (at.y + at.height / 2 - y) ** 2;
      if (distance < least) [best, least] = [mark, distance];
    }
    return best;
  };

  const choose = (figure, index) => {
    figure.classList.toggle("chosen", index !== null);
    for (const part of figure.querySelectorAll("[data-series]")) {
      part.classList.toggle("lit", part.dataset.series === index);
    }
  };

  for (const figure of document.querySelectorAll("figure")) {
    const svg = figure.querySelector("svg");
    const marks = [...svg.querySelectorAll(".series .mark")];
    for (const mark of marks) { // the page's own box takes the place of the browser's
      const title = mark.querySelector("title");
      mark.dataset.text = title.textContent;
      title.remove();
    }
    svg.setAttribute("role", "group");
    svg.setAttribute("tabindex", "0");
    svg.addEventListener("pointermove", (event) => {
      const mark = nearest(marks, event.clientX, event.clientY);
      mark ? show(mark) : hide();
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return hide();
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.target !== svg || !step || !marks.length) return;
      event.preventDefault();
      show(marks[(marks.indexOf(near) + step + marks.length + (near ? 0 : step < 0)) % marks.length]);
    });

    let pressed = null;
    for (const key of svg.querySelectorAll(".key")) {
      const index = key.dataset.series;
      key.setAttribute("role", "button");
      key.setAttribute("tabindex", "0");
      key.setAttribute("aria-pressed", "false");
      const toggle = () => {
        pressed = pressed === index ? null : index;
        for (const other of svg.querySelectorAll(".key")) {
          other.setAttribute("aria-pressed", String(other.dataset.series === pressed));
        }
        choose(figure, pressed);
      };
      key.addEventListener("click", toggle);
      key.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        toggle();
      });
      key.addEventListener("pointerenter", () => choose(figure, index));
      key.addEventListener("pointerleave", () => choose(figure, pressed));
    }
  }

  addEventListener("scroll", hide, { passive: true });

  const value = (cell) => "value" in cell.dataset ? Number(cell.dataset.value) : cell.textContent;
  const missing = (cell) => cell.textContent === "–";
  const compare = (a, b) =>
    typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en");

  for (const head of document.querySelectorAll("thead th")) {
    head.querySelector("button").addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const column = [...head.parentNode.children].indexOf(head);
      const body = head.closest("table").tBodies[0];
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [a.cells[column], b.cells[column]];
        if (missing(x) || missing(y)) return missing(x) - missing(y); // at the end, both ways
        return compare(value(x), value(y)) * (down ? -1 : 1);
      });
      body.append(...rows);
    });
  }
}
