/* The site's search runs in a worker, which browsers refuse to pages that are opened from the disk. There, a hidden frame
 * takes the worker's place: the same script with the same messages, in a window of its own. Pages that come from a
 * server keep their worker. The theme's search looks for the name IFrameWorker in the window above its own. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.deliver(this, data);
      // One script after the other, as in a worker.
      this.inside.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => this.load(next)), Promise.resolve());
      this.load(url).then(
        () => {
          this.ready = true;
          this.waiting.forEach((data) => this.deliver(this.inside, data));
        },
        () => this.dispatchEvent(new ErrorEvent("error", { message: `can't load ${url}` }))
      );
      this.frame = frame;
    }

    postMessage(data) {
      if (this.ready) this.deliver(this.inside, data);
      else this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }

    deliver(target, data) {
      setTimeout(() => target.dispatchEvent(new MessageEvent("message", { data })));
    }

    load(url) {
      const script = this.inside.document.createElement("script");
      script.src = url;
      return new Promise((resolve, reject) => {
        script.onload = resolve;
        script.onerror = reject;
        this.inside.document.body.appendChild(script);
      });
    }
  };
  window.Worker = window.IFrameWorker;
}
