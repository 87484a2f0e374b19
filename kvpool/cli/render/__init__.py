"""What the commands print, made from what the client returns."""
