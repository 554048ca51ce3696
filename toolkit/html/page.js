"use strict";

// Tables: a click on a head sorts by that column, another click turns the order round.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement;
    const column = head.cellIndex;
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = head.closest("table").tBodies[0];
    const key = (row) => {
      const cell = row.cells[column];
      const number = cell.dataset.v;
      return number === undefined ? cell.textContent : number === "" ? -Infinity : Number(number);
    };
    const rows = Array.from(body.rows, (row) => [key(row), row]);
    rows.sort(([a], [b]) => (typeof a === "string" ? a.localeCompare(b) : a - b) * (up ? 1 : -1));
    body.append(...rows.map(([, row]) => row));
  });
}

// Graphs: the window that is shown is the viewBox; `scale` is pixels a unit.
for (const graph of document.querySelectorAll(".graph")) {
  const svg = graph.querySelector("svg");
  const about = graph.querySelector(".about");
  const status = graph.querySelector("[role=status]");
  const search = graph.querySelector("input");
  const nodes = Array.from(svg.querySelectorAll(".node"));
  const edges = Array.from(svg.querySelectorAll(".edge"));
  const width = Number(svg.dataset.width);
  const height = Number(svg.dataset.height);
  const view = { x: 0, y: 0, scale: 1 };
  let chosen = -1;
  let pinned = false;
  let hits = [];
  let hit = -1;

  const draw = () => {
    const w = svg.clientWidth / view.scale;
    const h = svg.clientHeight / view.scale;
    svg.setAttribute("viewBox", `${view.x} ${view.y} ${w} ${h}`);
  };
  const fit = () => {
    view.scale = Math.min(svg.clientWidth / width, svg.clientHeight / height, 1.5);
    view.x = (width - svg.clientWidth / view.scale) / 2;
    view.y = (height - svg.clientHeight / view.scale) / 2;
    draw();
  };
  const centre = (index) => {
    const node = nodes[index];
    view.scale = Math.max(view.scale, 0.9);
    view.x = Number(node.dataset.x) - svg.clientWidth / view.scale / 2;
    view.y = Number(node.dataset.y) - svg.clientHeight / view.scale / 2;
    draw();
  };
  // A graph that would be too small to read as a whole begins at its first node.
  const begin = () => {
    fit();
    if (view.scale < 0.6 && nodes.length) {
      view.scale = 0.9;
      centre(0);
      view.y = Math.max(-20, Number(nodes[0].dataset.y) - 60);
      draw();
    }
  };
  const zoom = (factor, px = svg.clientWidth / 2, py = svg.clientHeight / 2) => {
    const scale = Math.min(4, Math.max(0.02, view.scale * factor));
    view.x += px / view.scale - px / scale;
    view.y += py / view.scale - py / scale;
    view.scale = scale;
    draw();
  };
  const choose = (index) => {
    if (index === chosen || index < 0) return;
    if (chosen >= 0) nodes[chosen].classList.remove("chosen");
    chosen = index;
    nodes[index].classList.add("chosen");
    for (const edge of edges) {
      edge.classList.toggle("lit", edge.dataset.from === `${index}` || edge.dataset.to === `${index}`);
    }
    const list = document.createElement("dl");
    for (const [name, value] of JSON.parse(nodes[index].dataset.facts)) {
      list.append(document.createElement("dt"), document.createElement("dd"));
      list.children[list.children.length - 2].textContent = name;
      list.lastChild.textContent = value;
    }
    about.replaceChildren(list);
  };
  const indexOf = (target) => nodes.indexOf(target.closest(".node"));

  svg.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(-event.deltaY * 0.0015), event.offsetX, event.offsetY);
  }, { passive: false });
  let drag = null;
  svg.addEventListener("pointerdown", (event) => {
    drag = { x: event.clientX, y: event.clientY, moved: 0, node: indexOf(event.target) };
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!drag) {
      if (!pinned) choose(indexOf(event.target));
      return;
    }
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    drag.moved += Math.abs(dx) + Math.abs(dy);
    [drag.x, drag.y] = [event.clientX, event.clientY];
    view.x -= dx / view.scale;
    view.y -= dy / view.scale;
    draw();
  });
  svg.addEventListener("pointerup", () => {
    if (drag && drag.moved < 5) {
      pinned = drag.node >= 0;
      choose(drag.node);
    }
    drag = null;
  });
  svg.addEventListener("pointercancel", () => { drag = null; });
  const step = (by) => {
    pinned = true;
    choose(Math.min(nodes.length - 1, Math.max(0, chosen + by)));
    centre(chosen);
  };
  const keys = {
    "+": () => zoom(1.3), "-": () => zoom(1 / 1.3), "0": fit,
    ArrowDown: () => step(1), ArrowRight: () => step(1),
    ArrowUp: () => step(-1), ArrowLeft: () => step(-1),
  };
  svg.addEventListener("keydown", (event) => {
    if (!keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  const actions = { in: keys["+"], out: keys["-"], fit, begin, next: () => go(1) };
  for (const button of graph.querySelectorAll(".tools button")) {
    button.addEventListener("click", actions[button.dataset.do]);
  }
  const go = (by) => {
    if (!hits.length) return;
    hit = (hit + by + hits.length) % hits.length;
    pinned = true;
    choose(hits[hit]);
    centre(hits[hit]);
    status.textContent = `${hit + 1} of ${hits.length}`;
  };
  search.addEventListener("input", () => {
    const text = search.value.trim().toLowerCase();
    hits = [];
    hit = -1;
    nodes.forEach((node, index) => {
      const found = text !== "" && node.dataset.search.includes(text);
      node.classList.toggle("hit", found);
      node.classList.toggle("dim", text !== "" && !found);
      if (found) hits.push(index);
    });
    status.textContent = text ? "no node" : "";
    go(1);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "Enter") go(event.shiftKey ? -1 : 1);
  });
  new ResizeObserver(draw).observe(svg);
  begin();
}
