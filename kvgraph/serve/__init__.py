"""An OpenAI-compatible server over one artifact: `kvgraph serve`.

    request -> protocol (types) -> admission (room) -> generation (AsyncEngine) -> answers (JSON)

starlette routes; uvicorn with httptools listens; msgspec checks and writes JSON (one declaration
for types, limits and errors; ten times as fast as the standard library); prometheus-client counts.
Other servers of this field use the same packages.
"""
