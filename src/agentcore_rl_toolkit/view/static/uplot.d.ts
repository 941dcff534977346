// The one global of `vendor/uPlot.iife.min.js`.
declare const uPlot: any;
