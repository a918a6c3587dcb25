//! A kernel is rebuilt when anything that it depends on changes.

#[path = "../../build/fingerprint.rs"]
mod build;

use std::fs;

#[test]
fn every_header_source_and_flag_counts() {
    let folder = std::env::temp_dir().join(format!("candle-sage-fingerprint-{}", std::process::id()));
    fs::create_dir_all(folder.join("deep/deeper")).expect("a folder");
    let write = |name: &str, text: &str| fs::write(folder.join(name), text).expect("a file");
    write("a.cuh", "one");
    write("deep/deeper/b.cuh", "two");
    write("deep/c.txt", "not a header");
    let print = |flags: &str| {
        let headers = build::files(&folder, "cuh").expect("a listing");
        assert_eq!(headers.len(), 2, "headers in sub-folders count, other files do not");
        build::of(&headers, &[flags]).expect("a fingerprint")
    };
    let before = print("-O3");
    assert_eq!(print("-O3"), before);
    assert_ne!(print("-O2"), before, "a flag");
    write("deep/deeper/b.cuh", "twO");
    assert_ne!(print("-O3"), before, "a header in a sub-folder");
    write("deep/deeper/b.cuh", "two");
    write("a.cuh", "onet");
    write("deep/deeper/b.cuh", "wo");
    assert_ne!(print("-O3"), before, "bytes that move from one file to the next");
    write("a.cuh", "  // what it is\n\none  // and why\n");
    write("deep/deeper/b.cuh", "two");
    assert_eq!(print("-O3"), before, "comments and empty lines do not count");
    write("a.cuh", "\"http://one\"");
    let before = print("-O3");
    write("a.cuh", "\"http://two\"");
    assert_ne!(print("-O3"), before, "a string with two slashes");
    write("k.cu", "#include <a.cuh>\n#include <stdint.h>\n");
    write("a.cuh", "#pragma once\n  #include <deep/deeper/b.cuh>\n");
    write("deep/deeper/b.cuh", "#include <a.cuh>");
    write("other.cuh", "");
    let read = build::with_headers(&folder.join("k.cu"), &folder).expect("headers");
    let names = ["a.cuh", "deep/deeper/b.cuh", "k.cu"].map(|name| folder.join(name));
    assert_eq!(read, names, "what is included by what is included, and nothing else");
    fs::remove_dir_all(&folder).expect("to remove the folder");
}
