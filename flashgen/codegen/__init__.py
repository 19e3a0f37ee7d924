"""RenderContext and templates: a problem and its schedules become one readable module."""
