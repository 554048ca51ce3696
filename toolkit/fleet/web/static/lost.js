// Says that a page is old while its connection is lost: its values would look like those of now.
(() => {
  const show = (lost) => { document.getElementById("lost").hidden = !lost; };
  let timer = document.querySelector("#live[hx-sse\\:connect]") && setTimeout(show, 5000, true);
  document.addEventListener("htmx:sse:before:connection", () => {
    timer = timer || setTimeout(show, 2000, true);
  });
  document.addEventListener("htmx:sse:after:connection", () => {
    clearTimeout(timer);
    timer = null;
    show(false);
  });
  document.addEventListener("htmx:sse:error", (event) => {
    if (event.detail.status === 401) location.reload();  // the session has ended
  });
})();
