"""Several engines behind one address, on Ray Serve.

    proxy -> Ingress (routes, text) -- tokens, digests --> PageRouter -> EngineReplica (an engine)
                                                            |   ^            |
                                                     choose |   | order      | reports
                                                            v   |            v
                                                          RoutingIndex (an actor)

Ray places, restarts and counts the processes. This package chooses the replica that holds the pages
of a prompt, and continues requests if a replica dies. Only `router`, `actors` and `application`
import Ray.
"""
