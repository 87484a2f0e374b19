"""The HTTP front: requests in flight over prefill and decode engines."""
