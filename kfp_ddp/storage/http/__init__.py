"""The HTTP/1.1 client that reads the objects of all stores, and lists Google Cloud Storage.

`answer` parses responses, `origin` has addresses, `connection` is one socket, `client` keeps
connections, follows redirects and reads objects. A failure is an `OSError`, and every size that a
server sends is bounded.

Why not a library: a dataset is often a million small files, and their processor time is the cost of
a sync. Of 10,000 x 20 KB this client took 110 us for each, aiohttp 275, urllib3 191, httpx 361,
requests 553; 20 x 50 MB over TLS took 4.5 to 6.0 s of processor, aiohttp 9.1 to 9.5.
"""
