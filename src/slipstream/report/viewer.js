// The trace viewer and the export of figures. The page is readable without it: every step shows.
(() => {
  document.documentElement.classList.add("js");
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  class Viewer {
    constructor(root) {
      this.root = root;
      this.frames = all(".frame", root);
      this.turns = all(".turn", root);
      this.range = root.querySelector("input[type=range]");
      this.node = root.querySelector(".node");
      this.at = 0;
      root.addEventListener("keydown", (event) => this.key(event));
      root.addEventListener("click", (event) => this.click(event));
      this.range.addEventListener("input", () => this.go(Number(this.range.value)));
      this.go(0);
    }

    go(step) {
      const last = this.frames.length - 1;
      this.at = Math.max(0, Math.min(step, last));
      this.frames.forEach((frame, i) => frame.classList.toggle("on", i === this.at));
      this.turns.forEach((turn) =>
        turn.classList.toggle("now", Number(turn.dataset.step) === this.at));
      this.range.value = this.at;
      this.root.querySelector("output").textContent =
        this.frames.length ? `step ${this.at + 1} of ${this.frames.length}` : "no steps";
      this.pick(null);
    }

    key(event) {
      const moves = { ArrowLeft: this.at - 1, ArrowRight: this.at + 1, Home: 0, End: Infinity };
      if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      this.go(moves[event.key]);
    }

    click(event) {
      const button = event.target.closest("[data-go]");
      const turn = event.target.closest(".turn");
      const node = event.target.closest(".tv g");
      const moves = { first: 0, back: this.at - 1, on: this.at + 1, last: Infinity };
      if (button) this.go(moves[button.dataset.go]);
      if (turn) this.go(Number(turn.dataset.step));
      if (node) this.pick(node);
    }

    pick(node) {
      all(".tv g.picked", this.root).forEach((other) => other.classList.remove("picked"));
      if (node) node.classList.add("picked");
      this.node.textContent = node ? node.querySelector("title").textContent : "";
    }
  }

  const viewers = all(".viewer").map((root) => new Viewer(root));
  const show = (number) =>
    viewers.forEach((viewer, i) => viewer.root.classList.toggle("on", i === number));
  const choice = document.getElementById("choose");
  if (choice) choice.addEventListener("change", () => show(Number(choice.value)));
  show(0);

  // A picture as a file of its own: trees take the page's style along, charts carry theirs.
  function standalone(svg) {
    const copy = svg.cloneNode(true);
    const [, , width, height] = svg.getAttribute("viewBox").split(" ");
    copy.setAttribute("width", width);
    copy.setAttribute("height", height);
    if (copy.classList.contains("tv")) {
      const style = document.createElementNS("http://www.w3.org/2000/svg", "style");
      style.textContent = document.getElementById("tree-style").textContent;
      copy.prepend(style);
    }
    return { text: new XMLSerializer().serializeToString(copy), width, height };
  }

  function download(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function savePng(picture, name) {
    const scale = 2;
    const image = new Image();
    image.onload = () => {
      const canvas = document.createElement("canvas");
      canvas.width = picture.width * scale;
      canvas.height = picture.height * scale;
      const context = canvas.getContext("2d");
      context.fillStyle = getComputedStyle(document.body).getPropertyValue("--card");
      context.fillRect(0, 0, canvas.width, canvas.height);
      context.drawImage(image, 0, 0, canvas.width, canvas.height);
      canvas.toBlob((blob) => download(blob, name), "image/png");
    };
    image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(picture.text);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-save]");
    if (!button) return;
    const place = button.closest("figure, .viewer");
    const svg = place.querySelector(".frame.on svg") || place.querySelector("svg");
    if (!svg) return;
    const picture = standalone(svg);
    const step = place.classList.contains("viewer") ? `-step-${Number(place.querySelector("input").value) + 1}` : "";
    const name = button.closest(".save").dataset.name + step;
    if (button.dataset.save === "svg") {
      download(new Blob([picture.text], { type: "image/svg+xml" }), `${name}.svg`);
    } else {
      savePng(picture, `${name}.png`);
    }
  });
})();
