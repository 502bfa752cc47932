"""The HTTP/1.1 client that reads the objects of all stores, and lists Google Cloud Storage.

`answer` parses responses, `origin` has addresses, `connection` is one socket, `client` keeps
connections, follows redirects and reads objects. Small bodies arrive in the event loop,
a large one in a thread, as receiving, TLS and disk release the interpreter's lock. A failure is an
`OSError`, and every size that a server sends is bounded.

Why not a library: a dataset is often a million small files, and their processor time is the cost of
a sync. aiohttp 3.14 behind the same interface, in turn with this client on two busy cores:

- 10,000 x 20 KB: 2.4 to 3.1 s of processor, this client 1.0 to 1.2 s;
- 2,000 x 20 KB over TLS with a latency of 30 ms: 1.1 s of processor, this client 0.5 s;
- 20 x 50 MB over TLS: 9.1 to 9.5 s, this client 4.5 to 6.0 s, rclone 4.9 to 7.6 s.

Of 10,000 x 20 KB others took, in microseconds of processor for each: google-cloud-storage's
transfer manager 787, requests 553, httpx 361, urllib3 191, http.client in threads 112, rclone 114.
A new TLS session takes 1.6 ms of processor, a resumed one 0.6: the first connection stores it.
"""
