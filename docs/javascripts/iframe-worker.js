// Search in pages opened from disk. A browser starts no worker there, so the search runs in a hidden frame of the page.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      const load = (url) => new Promise((done) => {
        const script = frame.contentDocument.createElement("script");
        script.src = url;
        script.onload = done;
        frame.contentDocument.body.append(script);
      });
      this.inner.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve());
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = load(address);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
