// Pages that are opened as files may start no worker, so the search runs in a hidden frame there. The theme knows such
// a frame by the name IFrameWorker, and awaits importScripts in it.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.document.open();
      this.inner.document.write("<!doctype html><html><body></body></html>");
      this.inner.document.close();
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner.importScripts = async (...urls) => {
        for (const each of urls) {
          await this.load(each);
        }
      };
      this.ready = this.load(url);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.inner.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        script.onerror = reject;
        this.inner.document.body.append(script);
      });
    }

    async postMessage(data) {
      await this.ready;
      this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data }));
    }

    terminate() {
      this.inner.frameElement.remove();
    }
  }
  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
}
