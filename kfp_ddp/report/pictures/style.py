"""The look of all pages: colours of a light and a dark scheme, type, tables, cards, print."""

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

# Series colours: the Okabe-Ito palette, told apart under all common colour blindness.
_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2733;--soft:#566472;--line:#dde3e9;
--card:#f5f7f9;--s0:#0072b2;--s1:#d55e00;--s2:#009e73;--s3:#b2408a;--s4:#a66f00;--s5:#3a6b8f;
--good:#00714f;--bad:#b3261e;--heat:0,96,168;--miss:196,78,0;--invert:#fff}
@media screen and (prefers-color-scheme:dark){:root{--paper:#14191f;--ink:#e4e9ee;--soft:#9aa8b5;
--line:#2e3841;--card:#1c232b;--s0:#56b4e9;--s1:#f0954a;--s2:#2fc79a;--s3:#e08fc0;--s4:#e6b800;
--s5:#a9c7e8;--good:#2fc79a;--bad:#ff8a80;--heat:86,180,233;--miss:240,149,74;--invert:#0d1217}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 24px 40px;max-width:1080px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:22px;line-height:1.25;margin:0 0 2px;font-weight:650;overflow-wrap:anywhere}
h2{font-size:16px;margin:34px 0 10px;font-weight:650}
h3{font-size:14px;margin:18px 0 6px;font-weight:650}
p{margin:6px 0}.soft{color:var(--soft)}.good{color:var(--good)}.bad{color:var(--bad)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:14px 0}
.card{background:var(--card);border-radius:8px;padding:8px 14px;line-height:1.35}
.card b{display:block;font-size:19px;font-weight:650;white-space:nowrap;
font-variant-numeric:tabular-nums}
.card span{color:var(--soft);font-size:13px;overflow-wrap:anywhere}.card small{display:block;
color:var(--soft);font-size:12px;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.verdict{border-left:5px solid var(--soft);background:var(--card);border-radius:0 8px 8px 0;
padding:10px 16px;margin:14px 0;overflow-wrap:anywhere}
.verdict.yes{border-color:var(--good)}.verdict.no{border-color:var(--bad)}
.verdict b{font-size:17px;font-weight:650}.verdict.yes>b{color:var(--good)}
.verdict.no>b{color:var(--bad)}.verdict ul{margin:6px 0 0;padding:0;list-style:none;font-size:14px}
.verdict li{padding-left:22px;text-indent:-22px}
.row{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(400px,100%),1fr));gap:20px 28px}
.row.three{grid-template-columns:repeat(auto-fit,minmax(min(170px,100%),1fr))}
.row>*{min-width:0}
.scroll{overflow-x:auto}.narrow{max-width:640px}
.chart{margin:0}.chart figcaption{font-size:14px;font-weight:600}
.key{display:flex;flex-wrap:wrap;gap:0 16px;font-size:12px;color:var(--soft);min-height:19px}
.key i{display:inline-block;width:16px;height:3px;border-radius:2px;vertical-align:middle;
margin-right:6px}.key i.dash{background:none;border-top:2px dashed var(--soft);height:0}
.key i.box{width:12px;height:12px;border-radius:2px}
.shares{display:flex;gap:1px;height:22px;border-radius:4px;overflow:hidden;margin:8px 0 6px}
.shares i{display:block;min-width:1px}
.plot{position:relative;height:220px;margin:8px 14px 0 52px}.three .plot{height:130px}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible}
.plot span{position:absolute;font-size:12px;line-height:1;color:var(--soft);white-space:nowrap;
font-variant-numeric:tabular-nums}
.plot .y{right:100%;margin-right:8px;transform:translateY(-50%)}
.plot .x{top:100%;margin-top:6px;transform:translateX(-50%)}
.chart .under{text-align:center;font-size:12px;color:var(--soft);margin:20px 0 0}
svg path,svg line{vector-effect:non-scaling-stroke}
svg .grid{stroke:var(--line);stroke-width:1}
svg .tick{stroke:var(--soft);stroke-width:1}
svg .curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg .dot{fill:none;stroke-width:6.5;stroke-linecap:round}
svg .mark{stroke:var(--soft);stroke-width:1.5;stroke-dasharray:4 3}
.matrix{display:block}
.matrix text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--soft)}
.matrix .value{fill:var(--ink);text-anchor:middle;dominant-baseline:central}
.matrix .value.over{fill:var(--invert)}
.matrix .value.few{fill:rgb(var(--miss));font-weight:650}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:4px 10px;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500;vertical-align:bottom}
th:first-child,td:first-child{text-align:left;min-width:96px;max-width:340px;padding-left:0;
overflow-wrap:anywhere}
td small{color:var(--soft);font-size:12px;white-space:nowrap}
.pairs :is(th,td):nth-child(2){text-align:left;min-width:84px;overflow-wrap:anywhere}
.plain td,.plain th{text-align:left;overflow-wrap:anywhere}
.plain th,.plain th:first-child{width:1%;min-width:0;white-space:nowrap;vertical-align:top}
.thumbs{display:grid;grid-template-columns:repeat(auto-fill,minmax(136px,1fr));gap:12px;margin:0;
padding:0;list-style:none}
.thumbs li{background:var(--card);border-radius:8px;padding:10px;font-size:13px;line-height:1.4;
overflow-wrap:anywhere}
.thumbs img{width:100%;aspect-ratio:1;object-fit:contain;border-radius:4px;display:block;
margin-bottom:6px;image-rendering:auto}
.thumbs img.tiny{image-rendering:pixelated}.thumbs small{color:var(--soft);font-size:11px;
display:block}
.bar{background:var(--line);border-radius:3px;height:8px;min-width:60px;margin-top:7px}
.bar i{display:block;height:8px;border-radius:3px;background:var(--s0)}
details{margin-top:10px}summary{cursor:pointer;color:var(--soft)}
@media(min-width:900px){.cards{grid-template-columns:repeat(auto-fit,minmax(210px,1fr))}}
@media(max-width:640px){body{padding:14px 14px 30px}h2{margin-top:26px}
.cards{grid-template-columns:repeat(auto-fit,minmax(132px,1fr));gap:8px;margin:10px 0}
.card{padding:7px 11px}th,td{padding:4px 6px}
.thumbs{grid-template-columns:repeat(auto-fill,minmax(118px,1fr));gap:8px}
.plot{margin-left:46px}}
@media(max-width:480px){.wide,:is(.taught,.slices) :is(th,td):nth-child(3){display:none}
.plot{height:190px}}
@media print{body{max-width:none;padding:0;font-size:13px}*{print-color-adjust:exact;
-webkit-print-color-adjust:exact}figure,.card,.verdict,.thumbs li,tr{break-inside:avoid}
h2,h3,summary{break-after:avoid}details::details-content{content-visibility:visible;
display:block;height:auto}.scroll{overflow:visible}.matrix{max-width:100%;height:auto}}
"""


class Card(NamedTuple):
    """A headline number: what it is, itself, and what is to be known beside it."""

    label: str
    value: str
    beside: str = ""


def page(title: str, body: str) -> str:
    """A whole HTML document around `body`, which is HTML already."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def cards(values: Iterable[tuple[str, ...]]) -> str:
    """A row of headline numbers, from `Card`s or (label, value) pairs."""
    inner = "".join(
        f'<div class="card"><b>{escape(card.value)}</b><span>{escape(card.label)}</span>'
        f"{f'<small>{escape(card.beside)}</small>' if card.beside else ''}</div>"
        for card in (Card(*each) for each in values)
    )
    return f'<div class="cards">{inner}</div>'
