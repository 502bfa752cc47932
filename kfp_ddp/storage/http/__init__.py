"""The one HTTP/1.1 client of data_sync: for small bodies and big ones, listings and manifests.

`answer` takes apart what arrives, `origin` knows where a server is and how a request to it reads,
`connection` is one socket, `client` keeps connections and follows redirects. Small bodies arrive
in the event loop; a big one in a thread, as receiving, TLS and disk leave the interpreter's lock.
What failed is an `OSError`; every size that a peer names is bounded.

Why not a library: a dataset is often a million small files, and the processor time of each is
what a sync costs. Measured over 10,000 files of 20 KB, whole process, on a quiet machine:

- google-cloud-storage's transfer manager 787 to 1,054 us a file, requests 553 to 939, httpx 361,
  urllib3 191 to 384, http.client in threads 112 to 228, aiohttp 115 to 122, rclone 114 to 133;
- ours 0.9 to 1.0 s of processor in all, 1.3 s over TLS, 41 to 62 MB of memory; a bare loop over
  obstore, with the same crc32c, 1.9 to 2.1 s and 2.1 to 2.3 s, 57 to 74 MB;
- at 30 ms to each answer over TLS, ours and obstore are equal at 64 connections; 128 were 1.8
  times faster than 64;
- to begin TLS anew 1.5 to 1.7 ms of processor, while others used it too, and 0.6 to go on from a
  session that the server gave: the first connection gets it, the others take it.
"""
