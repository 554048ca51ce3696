"""The preview page: one file, no address but the server's own."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>Tandem preview</title>
<style>
:root { color-scheme: light dark; }
body { font: 15px/1.4 system-ui, sans-serif; margin: 0.75rem; }
body { background: Canvas; color: CanvasText; }
h1 { font-size: 1.3rem; margin: 0; }
p { margin: 0.2rem 0; }
main { display: grid; grid-template-columns: 1fr auto; gap: 1rem; align-items: start; }
#cameras { display: grid; gap: 0.5rem 1rem; grid-template-columns: 1fr; }
figure { margin: 0; min-width: 0; }
figure img { width: 100%; height: auto; background: #8884; border-radius: 6px; display: block; }
figcaption { display: flex; gap: 0 1rem; flex-wrap: wrap; font-variant-numeric: tabular-nums; }
figcaption b { margin-right: auto; overflow-wrap: anywhere; }
#dropped { width: 0; min-width: 100%; overflow-wrap: anywhere; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.1rem 0 0.1rem 0.8rem; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
@media (max-width: 43rem) { main { grid-template-columns: 1fr; } }
#state { font-weight: 600; }
.lost { color: #c33; }
</style>
</head>
<body>
<h1 id="name">Tandem</h1>
<p id="state">waiting for the first frame</p>
<main>
<div id="cameras"></div>
<section>
<table id="stages">
<thead><tr><th>stage</th><th>p50 ms</th><th>p99 ms</th></tr></thead><tbody></tbody>
</table>
<p id="dropped"></p>
</section>
</main>
<script>
"use strict";
const known = new Map();
const element = (tag, text = "") => Object.assign(document.createElement(tag), {textContent: text});

function cameraView(camera) {
  if (!known.has(camera.id)) {
    const figure = element("figure"), image = element("img"), caption = element("figcaption");
    image.src = "stream/" + encodeURIComponent(camera.id);
    image.alt = "live picture of " + (camera.id || "the camera");
    figure.append(image, caption);
    document.getElementById("cameras").append(figure);
    known.set(camera.id, caption);
  }
  return known.get(camera.id);
}

// As many columns as make the pictures largest in this window, without scrolling: under the
// header, each row with its caption. A narrow window has one column, and scrolls.
function fit() {
  const seen = [...document.images].filter(image => image.naturalWidth > 0);
  if (!seen.length) return;
  const ratio = image => image.naturalWidth / image.naturalHeight, rem = 16;
  const narrow = matchMedia("(max-width: 43rem)").matches;
  const cameras = document.getElementById("cameras"), count = known.size;
  const rowHeight = columns => (innerHeight - 5.5 * rem) / Math.ceil(count / columns) - 2.5 * rem;
  let best = {columns: 1, width: 0};
  for (let columns = 1; columns <= (narrow ? 1 : count); columns++) {
    const width = Math.min(cameras.clientWidth / columns, rowHeight(columns) * ratio(seen[0]));
    if (width > best.width) best = {columns, width};
  }
  cameras.style.gridTemplateColumns = `repeat(${best.columns}, 1fr)`;
  for (const image of seen)
    image.style.width = narrow ? "100%" :
      `min(100%, ${Math.max(rowHeight(best.columns), rem) * ratio(image)}px)`;
}
addEventListener("resize", fit);

function show(status) {
  fit();
  document.getElementById("name").textContent = status.pipeline;
  const state = document.getElementById("state");
  state.className = "";
  state.textContent = status.stats === null ? "waiting for the first figures" :
    `${status.stats.fps.toFixed(1)} frames/s, ${status.stats.latency_p50_ms.toFixed(1)} ms from ` +
    `frame to result (p99 ${status.stats.latency_p99_ms.toFixed(1)} ms)`;
  for (const camera of status.cameras) {
    const name = element("b", camera.id || camera.source);
    const texts = [`frame ${camera.seq}`, `${camera.detections} found`,
                   `${camera.age_ms.toFixed(0)} ms old`];
    cameraView(camera).replaceChildren(name, ...texts.map(text => element("span", text)));
  }
  if (status.stats === null) return;
  const rows = Object.entries(status.stats.stage_p50_ms).map(([stage, p50]) => {
    const row = element("tr");
    row.append(element("td", stage), element("td", p50.toFixed(2)),
               element("td", status.stats.stage_p99_ms[stage].toFixed(2)));
    return row;
  });
  document.querySelector("#stages tbody").replaceChildren(...rows);
  const drops = Object.entries(status.stats.dropped).map(([cause, n]) => `${n} ${cause}`);
  document.getElementById("dropped").textContent = "dropped: " + (drops.join(", ") || "none");
}

async function poll() {
  try {
    const answer = await fetch("status.json", {cache: "no-store"});
    show(await answer.json());
  } catch (error) {
    const state = document.getElementById("state");
    state.className = "lost";
    state.textContent = "the pipeline has ended";
  }
  setTimeout(poll, 500);
}
poll();
</script>
</body>
</html>
"""
