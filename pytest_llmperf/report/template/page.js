"use strict";
(() => {
  const table = document.querySelector("table.cases");
  if (!table) return;
  const cases = [...table.tBodies];
  const words = document.getElementById("words");
  const verdict = document.getElementById("verdict");
  const shown = document.getElementById("shown");
  const texts = new Map(cases.map((one) => [one, one.textContent.toLowerCase()]));

  const filter = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const one of cases) {
      const fits = (!verdict.value || one.dataset.verdict === verdict.value) &&
        wanted.every((word) => texts.get(one).includes(word));
      one.hidden = !fits;
      count += fits;
    }
    shown.textContent = `${count} of ${cases.length} cases`;
  };

  const open = () => {
    const one = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!one || !one.classList.contains("case")) return;
    if (one.hidden) { words.value = verdict.value = ""; filter(); }
    one.querySelector("details.opener").open = true;
    one.scrollIntoView();
  };

  const key = (one, column) => {
    const cell = one.rows[0].cells[column];
    return cell.dataset.o === undefined ? cell.textContent : Number(cell.dataset.o.replace("inf", "Infinity"));
  };
  const compare = (a, b) => typeof a === "number" && typeof b === "number" ? (a > b) - (a < b)
    : String(a).localeCompare(String(b), "en", { numeric: true });

  const sort = (heading) => {
    const column = Number(heading.dataset.column);
    const down = heading.getAttribute("aria-sort") === "ascending";
    for (const other of heading.parentElement.cells) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const keys = new Map(cases.map((one) => [one, key(one, column)]));
    const sign = down ? -1 : 1;
    cases.sort((a, b) => sign * compare(keys.get(a), keys.get(b)));
    table.append(...cases);
  };

  for (const heading of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = heading.textContent;
    button.addEventListener("click", () => sort(heading));
    heading.replaceChildren(button);
  }
  for (const button of document.querySelectorAll("button.copy")) {
    if (!navigator.clipboard) break;
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(button.previousElementSibling.textContent);
      button.textContent = "copied";
    });
  }
  const form = document.querySelector("form.filter");
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  words.addEventListener("input", filter);
  verdict.addEventListener("change", filter);
  filter();
  addEventListener("hashchange", open);
  open();
})();
