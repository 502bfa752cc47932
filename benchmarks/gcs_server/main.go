// A read-only bucket for measuring clients: the part of the GCS JSON API that a download needs,
// from memory, on loopback, fast enough that the client is what is measured.
package main

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/md5"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/binary"
	"encoding/pem"
	"flag"
	"fmt"
	"hash/crc32"
	"log"
	"math/big"
	mrand "math/rand"
	"net"
	"net/http"
	"net/url"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"
)

const generation = "1700000000000000"

var latency time.Duration

// A bucket's names are sorted; object i has the content body(i).
type bucket struct {
	names []string
	body  func(int) []byte
	meta  []string // size, crc32c and md5 as JSON, of each distinct body
	kinds int
}

func newBucket(count, size, kinds int, pattern string) *bucket {
	random := mrand.New(mrand.NewSource(1))
	bodies := make([][]byte, kinds)
	meta := make([]string, kinds)
	for i := range bodies {
		bodies[i] = make([]byte, size)
		random.Read(bodies[i])
		var crc [4]byte
		binary.BigEndian.PutUint32(crc[:], crc32.Checksum(bodies[i], crc32.MakeTable(crc32.Castagnoli)))
		sum := md5.Sum(bodies[i])
		meta[i] = fmt.Sprintf(`"size":"%d","crc32c":"%s","md5Hash":"%s"`, size,
			base64.StdEncoding.EncodeToString(crc[:]), base64.StdEncoding.EncodeToString(sum[:]))
	}
	names := make([]string, count)
	for i := range names {
		names[i] = fmt.Sprintf(pattern, i/1000, i)
	}
	return &bucket{names, func(i int) []byte { return bodies[i%kinds] }, meta, kinds}
}

func (b *bucket) find(name string) int {
	i := sort.SearchStrings(b.names, name)
	if i < len(b.names) && b.names[i] == name {
		return i
	}
	return -1
}

// item writes the object's resource, or only the wanted fields of it, as GCS does.
func (b *bucket) item(out *bytes.Buffer, id, host, scheme string, i int, wanted string) {
	name := b.names[i]
	fmt.Fprintf(out, `{"name":%q,"generation":"%s",%s`, name, generation, b.meta[i%b.kinds])
	for _, field := range [][2]string{
		{"kind", "storage#object"}, {"id", id + "/" + name + "/" + generation}, {"bucket", id},
		{"metageneration", "1"}, {"contentType", "application/octet-stream"},
		{"storageClass", "STANDARD"}, {"etag", "CAE="},
		{"timeCreated", "2023-11-14T22:13:20.000Z"}, {"updated", "2023-11-14T22:13:20.000Z"},
		{"mediaLink", scheme + "://" + host + "/download/storage/v1/b/" + id + "/o/" + url.PathEscape(name) +
			"?generation=" + generation + "&alt=media"},
	} {
		if wanted == "" || strings.Contains(wanted, field[0]) {
			fmt.Fprintf(out, `,"%s":"%s"`, field[0], field[1])
		}
	}
	out.WriteByte('}')
}

func (b *bucket) list(w http.ResponseWriter, r *http.Request, id, scheme string) {
	query := r.URL.Query()
	size := 1000
	if n, err := strconv.Atoi(query.Get("maxResults")); err == nil && n < size {
		size = n
	}
	prefix, delimiter, wanted := query.Get("prefix"), query.Get("delimiter"), query.Get("fields")
	i := sort.SearchStrings(b.names, prefix)
	if n, err := strconv.Atoi(query.Get("pageToken")); err == nil {
		i = n
	}
	var items, folders bytes.Buffer
	found := 0
	for i < len(b.names) && found < size && strings.HasPrefix(b.names[i], prefix) {
		found++
		if cut := strings.Index(b.names[i][len(prefix):], delimiter); delimiter != "" && cut >= 0 {
			folder := b.names[i][:len(prefix)+cut+1]
			fmt.Fprintf(&folders, ",%q", folder)
			i += sort.Search(len(b.names)-i, func(k int) bool { return !strings.HasPrefix(b.names[i+k], folder) })
			continue
		}
		items.WriteByte(',')
		b.item(&items, id, r.Host, scheme, i, wanted)
		i++
	}
	out := bytes.NewBufferString(`{"kind":"storage#objects"`)
	for key, part := range map[string]*bytes.Buffer{"items": &items, "prefixes": &folders} {
		if part.Len() > 0 {
			fmt.Fprintf(out, `,"%s":[%s]`, key, part.Bytes()[1:])
		}
	}
	if i < len(b.names) && strings.HasPrefix(b.names[i], prefix) {
		fmt.Fprintf(out, `,"nextPageToken":"%d"`, i)
	}
	out.WriteByte('}')
	send(w, http.StatusOK, "application/json", out.Bytes())
}

func send(w http.ResponseWriter, code int, kind string, body []byte) {
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(code)
	w.Write(body)
}

func (b *bucket) media(w http.ResponseWriter, r *http.Request, i int) {
	body := b.body(i)
	h := w.Header()
	var meta = b.meta[i%b.kinds]
	crc := strings.Split(strings.Split(meta, `"crc32c":"`)[1], `"`)[0]
	sum := strings.Split(strings.Split(meta, `"md5Hash":"`)[1], `"`)[0]
	h.Set("X-Goog-Hash", "crc32c="+crc+",md5="+sum)
	h.Set("X-Goog-Generation", generation)
	h.Set("X-Goog-Metageneration", "1")
	h.Set("X-Goog-Storage-Class", "STANDARD")
	h.Set("X-Goog-Stored-Content-Length", strconv.Itoa(len(body)))
	h.Set("X-Goog-Stored-Content-Encoding", "identity")
	h.Set("Etag", "CAE=")
	h.Set("Last-Modified", "Tue, 14 Nov 2023 22:13:20 GMT")
	h.Set("Accept-Ranges", "bytes")
	code := http.StatusOK
	if wanted := r.Header.Get("Range"); strings.HasPrefix(wanted, "bytes=") {
		from, to, _ := strings.Cut(wanted[6:], "-")
		first, _ := strconv.Atoi(from)
		last, err := strconv.Atoi(to)
		if err != nil || last >= len(body) {
			last = len(body) - 1
		}
		if first > last {
			send(w, http.StatusRequestedRangeNotSatisfiable, "application/json", []byte("{}"))
			return
		}
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, last, len(body)))
		body, code = body[first:last+1], http.StatusPartialContent
	}
	send(w, code, "application/octet-stream", body)
}

func serve(buckets map[string]*bucket) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(latency)
		scheme := "http"
		if r.TLS != nil {
			scheme = "https"
		}
		path := strings.TrimPrefix(r.URL.EscapedPath(), "/download")
		parts := strings.SplitN(strings.TrimPrefix(path, "/storage/v1/b/"), "/", 3)
		b := buckets[parts[0]]
		if b == nil {
			send(w, http.StatusNotFound, "application/json", []byte(`{"error":{"code":404,"message":"no such bucket"}}`))
			return
		}
		if len(parts) == 1 {
			send(w, http.StatusOK, "application/json", []byte(`{"kind":"storage#bucket","name":"`+parts[0]+`"}`))
			return
		}
		if len(parts) == 2 {
			b.list(w, r, parts[0], scheme)
			return
		}
		name, _ := url.PathUnescape(parts[2])
		i := b.find(name)
		if i < 0 {
			send(w, http.StatusNotFound, "application/json", []byte(`{"error":{"code":404,"message":"no such object"}}`))
			return
		}
		if r.URL.Query().Get("alt") == "media" || strings.HasPrefix(r.URL.Path, "/download") {
			b.media(w, r, i)
			return
		}
		var out bytes.Buffer
		b.item(&out, parts[0], r.Host, scheme, i, "")
		send(w, http.StatusOK, "application/json", out.Bytes())
	}
}

func certificate(path string) tls.Certificate {
	key, _ := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(240 * time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, DNSNames: []string{"localhost"},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		log.Fatal(err)
	}
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o644); err != nil {
		log.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// Prints one line when it serves: the plain port and the TLS port.
func main() {
	cert := flag.String("cert", "cert.pem", "where to write the certificate to trust")
	small := flag.Int("small", 2000, "objects of 20 KB in the bucket small")
	large := flag.Int("large", 20, "objects of 50 MB in the bucket large")
	many := flag.Int("many", 50000, "objects of 1 B in the bucket many")
	million := flag.Int("million", 1000000, "objects of 1 B in the bucket million")
	flag.DurationVar(&latency, "latency", 0, "pause before each answer")
	flag.Parse()
	buckets := map[string]*bucket{
		"small":   newBucket(*small, 20_000, min(*small, 2000), "ds/class%03d/img_%07d.jpg"),
		"large":   newBucket(*large, 50<<20, 1, "ds/part%03d/shard_%07d.tar"),
		"many":    newBucket(*many, 1, 10, "ds/class%03d/img_%07d.jpg"),
		"million": newBucket(*million, 1, 10, "ds/class%04d/img_%07d.jpg"),
	}
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	secure, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	server := &http.Server{Handler: serve(buckets), TLSConfig: &tls.Config{
		Certificates: []tls.Certificate{certificate(*cert)}, NextProtos: []string{"http/1.1"}},
		ErrorLog: log.New(os.Stderr, "", 0)}
	go func() { log.Fatal(server.ServeTLS(secure, "", "")) }()
	fmt.Println(plain.Addr().(*net.TCPAddr).Port, secure.Addr().(*net.TCPAddr).Port)
	log.Fatal(server.Serve(plain))
}
