"""The HTTP router: requests in flight over prefill and decode engines."""
