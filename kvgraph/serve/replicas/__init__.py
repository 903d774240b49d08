"""Several engines behind one address, on Ray Serve.

    proxy -> Ingress (routes, text) -- tokens, digests --> PageRouter -> EngineReplica (an engine)
                                                            |   ^            |
                                                     choose |   | order      | reports
                                                            v   |            v
                                                          RoutingIndex (an actor)

Ray places, restarts and counts the processes. What is here: which replica holds the pages of a
prompt, and requests that go on where a replica dies. Only `router`, `actors` and `application`
import Ray.
"""
