"""Records: metrics, explanations, recordings and measurements of requests."""
