"""Several routers before the same engines, one of which schedules for all."""
